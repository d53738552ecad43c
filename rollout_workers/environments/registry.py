"""From a domain's `environment` key to an environment of one episode."""

from collections.abc import Callable

from reward.errors import DomainError
from reward.user_code import is_reference, load_reference
from rollout_workers.environment import Environment, EnvironmentContext
from rollout_workers.environments.code import Code
from rollout_workers.environments.single_turn import SingleTurn
from rollout_workers.environments.terminal import Terminal

BUILTIN: dict[str, Callable[[EnvironmentContext], Environment]] = {
    "single_turn": SingleTurn,
    "terminal": Terminal,
    "code": Code,
}
"""Environments that ship with us, by the name a `domain.toml` calls them."""


def build_environment(context: EnvironmentContext) -> Environment:
    """A new environment for one episode; the caller closes it. Raises `DomainError` for a name that is not known.

    A user's class is loaded into this process: it drives sandboxes and verifiers, which are what policies are kept in.
    """
    name = context.domain.config.environment
    if is_reference(name):
        return load_reference(context.domain.folder, name)(context)
    if name not in BUILTIN:
        raise DomainError(
            f"environment = {name!r} is neither built in ({sorted(BUILTIN)}) nor of the form FILE.py:CLASS"
        )
    return BUILTIN[name](context)
