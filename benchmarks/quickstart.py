"""The main job over several seeds: pass rates with intervals, times, parity gap, leaks, in one JSON file.

    python -m benchmarks.quickstart --seeds 0 1 2 --out quickstart.json

Each seed is a run of `examples/quickstart/job.toml` with that seed, one after the other. The macro interval over
seeds is Student's t on the seeds' macro changes.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scipy import stats

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"


def job_with_seed(seed: int, folder: Path) -> Path:
    """A copy of the job file with another seed and absolute paths."""
    text = (QUICKSTART / "job.toml").read_text(encoding="utf-8")
    assert "seed = 0" in text, "the quickstart's seed is where it was"
    text = text.replace("seed = 0", f"seed = {seed}").replace('"domains/', f'"{QUICKSTART / "domains"}/')
    path = folder / f"seed-{seed}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def run(seed: int, folder: Path) -> dict[str, Any]:
    """One run's `report.json`."""
    command = [sys.executable, "-m", "orchestrator.cli", "run", str(job_with_seed(seed, folder)), "-o", "json"]
    done = subprocess.run([*command, "--runs", str(folder / "runs")], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the mean; NaN ends for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the quickstart is judged by."""
    macro = [report["macro"]["delta"] for report in reports]
    return {
        "macro_delta": statistics.fmean(macro),
        "macro_delta_ci95": interval(macro),
        "worst_domain_delta": min(d["delta"] for report in reports for d in report["domains"].values()),
        "baselines": {name: [r["domains"][name]["baseline"] for r in reports] for name in reports[0]["domains"]},
        "finals": {name: [r["domains"][name]["final"] for r in reports] for name in reports[0]["domains"]},
        "updates": [report["updates"] for report in reports],
        "rl_s": [report["wall_s"]["rl"] for report in reports],
        "max_logprob_gap": max(report["weight_sync"]["max_logprob_gap"] for report in reports),
        "sync_p50_s": [report["weight_sync"]["p50_s"] for report in reports],
        "leaked": sum(report["sandboxes"]["leaked"] for report in reports),
    }


def main() -> None:
    """Run the seeds, print the summary, write all reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crosstrain-benchmark-") as folder:
        reports = [run(seed, Path(folder)) for seed in arguments.seeds]
    result = {"seeds": arguments.seeds, "summary": summary(reports), "reports": reports}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
