"""Text to token ids and back, by the chat template of the policy's tokenizer.

Prompts and observations are tokenised here, once. What the policy writes stays the ids that the engine produced: it is
decoded for environments and never encoded again. An observation becomes exactly the tokens that the template puts
between the end of one assistant message and the beginning of the next, found by rendering a conversation with and
without it.
"""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

from jinja2 import TemplateError

from rollout_workers.errors import EngineConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = tuple[str, str]
"""Role and content."""

_USER: Message = ("user", "question")
_ASSISTANT: Message = ("assistant", "reply")
RENDERED_KEPT = 1024
"""Rendered conversations kept: a group's episodes begin alike, and many observations are empty."""


class Chat(Protocol):
    """What an episode needs of a tokenizer; each method as in `ChatTokenizer`."""

    @property
    def eos_id(self) -> int: ...
    def prompt_ids(self, system: str, user: str) -> tuple[int, ...]: ...
    def observation_ids(self, text: str) -> tuple[int, ...]: ...
    def message_ids(self, text: str) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteChat:
    """Bytes as ids and no template: for playing solutions where there is no policy whose tokens would matter."""

    eos_id = 256

    def prompt_ids(self, system: str, user: str) -> tuple[int, ...]:
        """The bytes of both messages."""
        return tuple((system + user).encode())

    def observation_ids(self, text: str) -> tuple[int, ...]:
        """The bytes of the message."""
        return tuple(text.encode())

    def message_ids(self, text: str) -> tuple[int, ...]:
        """The bytes of the message and the end token."""
        return (*text.encode(), self.eos_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of bytes; the end token is dropped."""
        return bytes(token for token in token_ids if token < self.eos_id).decode(errors="replace")


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template."""

    def __init__(self, tokenizer: "str | PreTrainedTokenizerBase") -> None:
        """`tokenizer`: a tokenizer, or a directory with one. Raises `EngineConfigError` for one that cannot chat."""
        self._tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._name = tokenizer if isinstance(tokenizer, str) else self._tokenizer.name_or_path or "the tokenizer"
        if not self._tokenizer.chat_template:
            raise EngineConfigError(f"model: {self._name} has no chat template; add a chat_template.jinja to it")
        eos_id = self._tokenizer.eos_token_id
        if not isinstance(eos_id, int):
            raise EngineConfigError(f"model: {self._name} has no eos_token; set it in its tokenizer_config.json")
        self._eos_id = eos_id
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        special.update(self._tokenizer.all_special_tokens)
        self._render = lru_cache(RENDERED_KEPT)(self._render_messages)
        self._special = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)))

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a policy message."""
        return self._eos_id

    def prompt_ids(self, system: str, user: str) -> tuple[int, ...]:
        """Ids of the conversation's start, up to where the policy begins to write. An empty `system` is left out."""
        first: tuple[Message, ...] = (("system", self._plain(system)),) if system else ()
        return self._render((*first, ("user", self._plain(user))), generation_prompt=True)

    def observation_ids(self, text: str) -> tuple[int, ...]:
        """Ids from the end of a policy message (its end-of-turn token excluded) to where the policy writes the next.

        Raises `EngineConfigError` when the template rewrites what came before: such a conversation cannot be extended.
        """
        before = self._first_turn
        after = self._render((_USER, _ASSISTANT, ("user", self._plain(text))), generation_prompt=True)
        if after[: len(before)] != before:
            raise EngineConfigError(
                f"model: the chat template of {self._name} changes earlier messages when the conversation goes on; "
                "use a template that only appends, or single-turn domains"
            )
        return after[len(before) :]

    def message_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a policy message written by someone else (a demonstration), end-of-turn token included."""
        return (*self._tokenizer.encode(self._plain(text), add_special_tokens=False), self.eos_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a policy message without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @cached_property
    def _first_turn(self) -> tuple[int, ...]:
        """A question and a reply, up to and including the reply's end-of-turn token."""
        ids = self._render((_USER, _ASSISTANT), generation_prompt=False)
        end = max((index for index, token in enumerate(ids) if token == self.eos_id), default=-1)
        if end < 0 or _ASSISTANT[1] in self.decode(ids[end:]):
            raise EngineConfigError(
                f"model: the chat template of {self._name} does not end assistant messages with "
                f"{self._tokenizer.eos_token}; set eos_token in its tokenizer_config.json to the token that does"
            )
        return ids[: end + 1]

    def _render_messages(self, messages: tuple[Message, ...], *, generation_prompt: bool) -> tuple[int, ...]:
        rows = [{"role": role, "content": content} for role, content in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                rows, tokenize=True, add_generation_prompt=generation_prompt, return_dict=False
            )
        except TemplateError as error:
            raise EngineConfigError(
                f"model: the chat template of {self._name} refuses the roles {[role for role, _ in messages]}: {error}"
                "; use a template with system, user and assistant messages"
            ) from error
        return tuple(ids)  # type: ignore[arg-type]  # a list of ids, as asked

    def _plain(self, text: str) -> str:
        """Break up literals of special tokens, so that no file or program output can end a turn or begin another."""
        return self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def load_tokenizer(directory: str) -> "PreTrainedTokenizerBase":
    """The tokenizer in a local directory. Raises `EngineConfigError` when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EngineConfigError(
            f"model: no tokenizer in {directory}; name a directory with tokenizer.json and tokenizer_config.json"
        ) from error
