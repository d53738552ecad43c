"""Times of a sandbox host: exec through the agent beside `docker exec` through the API, lease, reset and start.

    python -m benchmarks.sandboxes --out sandboxes.json

Both ways of running a command take turns in the same container, so that they see the same machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import docker

from sandboxes.client import AgentSandbox
from sandboxes.config import SandboxConfig
from sandboxes.pool import LocalProvider, SandboxHost

COMMAND = "echo hello"


async def measure(rounds: int, pool_size: int) -> dict[str, list[float]]:
    """Seconds of each kind of operation."""
    seconds: dict[str, list[float]] = {}

    def note(name: str, began: float) -> None:
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory(prefix="ct-") as root:
        host = SandboxHost(SandboxConfig(pool_size=pool_size), f"bench-{os.getpid()}", Path(root))
        provider = LocalProvider(host)
        client = docker.APIClient(version="auto")
        began = time.perf_counter()
        try:
            await host.start()
            note("first sandbox", began)
            while (await host.stats()).idle < pool_size:  # noqa: ASYNC110 - counters have no event
                await asyncio.sleep(0.01)
            note("whole pool", began)
            for _ in range(rounds):
                began = time.perf_counter()
                sandbox = await provider.acquire(timeout_s=60)
                note("acquire", began)
                assert isinstance(sandbox, AgentSandbox)
                await sandbox.exec("true")
                for _ in range(10):
                    began = time.perf_counter()
                    result = await sandbox.exec(COMMAND)
                    note("exec, agent", began)
                    assert result.stdout == b"hello\n"
                began = time.perf_counter()
                output = await asyncio.to_thread(docker_exec, client, sandbox.lease.container)
                note("exec, Docker API", began)
                assert output == b"hello\n"
                began = time.perf_counter()
                await provider.release(sandbox)
                while (await host.stats()).starting:  # noqa: ASYNC110 - counters have no event
                    await asyncio.sleep(0)
                note("release and reset", began)
        finally:
            client.close()
            await host.close()
    return seconds


def docker_exec(client: docker.APIClient, container: str) -> bytes:
    """The same command through the engine, as the same user."""
    made = client.exec_create(container, ["bash", "-c", COMMAND], user="1000:1000")
    output = client.exec_start(made["Id"])
    assert client.exec_inspect(made["Id"])["ExitCode"] == 0
    return output


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Count, median and 95th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {
        "n": len(ordered),
        "p50_ms": round(statistics.median(ordered) * 1000, 3),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] * 1000, 3),
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="leases; ten commands each")
    parser.add_argument("--pool-size", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = {
        name: summary(times) for name, times in asyncio.run(measure(arguments.rounds, arguments.pool_size)).items()
    }
    print(f"{'':24}{'n':>6}{'p50 ms':>10}{'p95 ms':>10}    load average {load:.1f} on {os.cpu_count()} processors")
    for name, row in results.items():
        print(f"{name:24}{row['n']:6}{row['p50_ms']:10.2f}{row['p95_ms']:10.2f}")
    if arguments.out:
        report = {"load_average": load, "processors": os.cpu_count(), "results": results}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
