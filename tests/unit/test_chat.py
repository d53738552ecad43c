"""Chat tokenizers: a byte-level one, a Qwen-like ChatML and a Llama-like template, each built here."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_workers.chat import ByteChat, Chat, ChatTokenizer
from rollout_workers.errors import EngineConfigError
from trainer.policy import byte_tokenizer

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("u", "s"), ("Ċ", "Ċ"), ("us", "e"), ("use", "r")]
"""Enough that tokens are longer than bytes and may join what stands side by side."""


WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How the tokenizers of Llama 3 and Qwen split text (less English contractions): line breaks stay together."""


def build(template: str, eos: str, specials: tuple[str, ...], **settings: Any) -> PreTrainedTokenizerFast:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, chat_template=template, **settings)


def chatml(template: str = CHATML) -> PreTrainedTokenizerFast:
    return build(template, "<|im_end|>", ("<|im_start|>", "<|im_end|>"))


def llama() -> PreTrainedTokenizerFast:
    headers = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return build(LLAMA, "<|eot_id|>", headers, bos_token="<|begin_of_text|>")


TOKENIZERS = {"bytes": byte_tokenizer(), "chatml": chatml(), "llama": llama()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def text_of(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("system", ["", "Answer in one word."])
def test_a_prompt_is_what_the_template_renders(tokenizer: PreTrainedTokenizerFast, system: str) -> None:
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": "hello user"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text_of(tokenizer, ChatTokenizer(tokenizer).prompt_ids(system, "hello user")) == rendered


def test_prompt_action_and_observation_make_the_conversation_the_template_renders(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = ChatTokenizer(tokenizer)
    ids = chat.prompt_ids("Be brief.", "hello")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    for action, observation in (("ls", "a.txt\nb.txt"), ("cat a.txt", "hello user")):
        ids += chat.message_ids(action) + chat.observation_ids(observation)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    assert list(ids) == tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


@given(text=st.text(max_size=30), name=st.sampled_from(sorted(TOKENIZERS)))
def test_a_message_comes_back_as_it_was_written(text: str, name: str) -> None:
    chat = ChatTokenizer(TOKENIZERS[name])
    ids = chat.message_ids(text)
    assert ids.index(chat.eos_id) == len(ids) - 1, "no text ends its message early"
    literals = [token for token in TOKENIZERS[name].all_special_tokens if token in text]
    assert chat.decode(ids) == text or literals, "only literals of special tokens are broken up"


@given(text=st.text(max_size=20), name=st.sampled_from(sorted(TOKENIZERS)), data=st.data())
def test_no_observation_can_end_a_turn_or_begin_another(text: str, name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    chat = ChatTokenizer(tokenizer)
    special = data.draw(st.sampled_from(tokenizer.all_special_tokens))
    forged = f"{text}{special}{special[:1]}{special}{text}"

    def count(ids: tuple[int, ...]) -> int:
        return sum(token in tokenizer.all_special_ids for token in ids)

    assert count(chat.observation_ids(forged)) == count(chat.observation_ids("harmless"))
    assert count(chat.prompt_ids(forged, forged)) == count(chat.prompt_ids("harmless", "harmless"))


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    chat = ChatTokenizer(byte_tokenizer())
    assert chat.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_a_directory_is_loaded_and_named_in_errors(tmp_path: Path) -> None:
    tokenizer = chatml()
    tokenizer.save_pretrained(tmp_path)
    assert ChatTokenizer(str(tmp_path)).prompt_ids("", "hi") == ChatTokenizer(tokenizer).prompt_ids("", "hi")
    with pytest.raises(EngineConfigError, match="nowhere"):
        ChatTokenizer(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML.replace("<|im_end|>", "<end>"), "does not end assistant messages with"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' }}"), "changes earlier"),
        (CHATML.replace("{% for", "{{ raise_exception('no') if messages | length > 1 }}{% for"), "refuses the roles"),
    ],
)
def test_a_template_that_cannot_be_extended_is_named_with_the_remedy(template: str, reason: str) -> None:
    chat = ChatTokenizer(chatml(template))
    with pytest.raises(EngineConfigError, match=reason):
        chat.observation_ids("hello")


def test_a_tokenizer_without_template_or_end_token_cannot_chat() -> None:
    silent = chatml()
    silent.chat_template = None
    with pytest.raises(EngineConfigError, match="chat template"):
        ChatTokenizer(silent)
    endless = chatml()
    endless.eos_token = None
    with pytest.raises(EngineConfigError, match="eos_token"):
        ChatTokenizer(endless)


def test_bytes_serve_where_there_is_no_policy() -> None:
    chat: Chat = ByteChat()
    assert chat.decode((*chat.prompt_ids("a", "b"), *chat.observation_ids("c"), *chat.message_ids("ö"))) == "abcö"
