"""Reading a config.json so that no key of it is dropped: each is used, known to be inert, or an error that names it."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from ...configs import ConfigError
from ...configs.schema import describe, join, nearest, parse

JSON = Any  # what json.loads returns

DTYPE = "dtype"  # under this name the dtype of the weights stands in Translation.inert, whichever of its two names the file uses


@dataclasses.dataclass(frozen=True)
class Inert:
    """A key that changes nothing in what the model computes; ``only`` are the values for which that holds (null: any)."""

    why: str
    only: tuple[JSON, ...] | None = None

    def holds(self, value: JSON) -> bool:
        """Whether the key is inert at ``value``; false and 0 are not each other's like."""
        if self.only is None:
            return True
        return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in self.only)


def inert(why: str, *names: str) -> dict[str, Inert]:
    """Keys that are inert at every value, all for one reason."""
    return {name: Inert(why) for name in names}


class Keys:
    """The keys of one config.json, or of one dict inside it (at ``path``).

    Every reader marks its key as used. ``defaults`` are the published class defaults that a missing key may take; those that were taken
    stand in ``defaulted``, the inert keys that were met in ``found_inert``.
    """

    def __init__(
        self, data: Mapping[str, JSON], defaults: Mapping[str, JSON], inert: Mapping[str, Inert], *, of: str, path: str = ""
    ) -> None:
        self.data, self.defaults, self.inert, self.of, self.path = data, defaults, inert, of, path
        self.defaulted: dict[str, JSON] = {}
        self.found_inert: dict[str, JSON] = {}
        self._used: set[str] = set()

    def take(self, name: str, hint: Any) -> Any:
        """The value of a key, of the annotated type; a missing key takes the published default, if there is one."""
        if name in self.data:
            return self.get(name, hint)
        if name not in self.defaults:
            raise ConfigError(f"{self.at(name)}: is missing; expected {describe(hint)} ({self.of} has no published default for it)")
        return self.default(name, self.defaults[name])

    def get(self, name: str, hint: Any) -> Any:
        """The value of a key, of the annotated type; None where it is missing."""
        if name not in self.data:
            return None
        self._used.add(name)
        return parse(hint, self.data[name], self.at(name))

    def default(self, name: str, value: Any) -> Any:
        """Note that ``name`` is missing and taken to be ``value``."""
        self.defaulted[self.at(name)] = value
        return value

    def idle(self, *names: str) -> None:
        """Note that these keys, if they are there, have no effect beside the values of the others."""
        self._used.update(names)
        self.found_inert |= {name: self.data[name] for name in names if name in self.data}

    def inner(self, name: str, defaults: Mapping[str, JSON], inert: Mapping[str, Inert]) -> Keys | None:
        """The keys of the dict under ``name``; None where it is missing, null or empty."""
        value = self.data.get(name)
        self._used.add(name)
        if not value and (value is None or isinstance(value, Mapping)):
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.at(name)}: is {value!r}; expected a dict")
        return Keys(value, defaults, inert, of=self.of, path=self.at(name))

    def at(self, name: str) -> str:
        """The dotted path of a key."""
        return join(self.path, name)

    def finish(self) -> None:
        """A ConfigError that names every key that nobody read and every inert key at a value that is not inert."""
        left = {name: value for name, value in self.data.items() if name not in self._used}
        wrong = [
            self._complaint(name, value) for name, value in left.items() if name not in self.inert or not self.inert[name].holds(value)
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))
        self.found_inert |= left

    def _complaint(self, name: str, value: JSON) -> str:
        if name in self.inert:
            known = self.inert[name]
            allowed = " or ".join("null" if v is None else repr(v) for v in known.only or ())
            return f"{self.at(name)}: is {reprlib.repr(value)}; expected {allowed}: {known.why}"
        guess = nearest(str(name), [*self._used, *self.defaults, *self.inert])
        return f"{self.at(name)}: unknown key of {self.of} (value {reprlib.repr(value)}){guess}"


GENERATION = (
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample "
    "early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty "
    "return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p use_cache"
)

# transformers' models of the families served here rotate whole heads: the default rope type ignores the factor, the others fail on it.
WHOLE_HEADS = {"partial_rotary_factor": Inert("these models rotate whole heads", (1.0, None))}

# The keys that every model type of transformers may carry.
COMMON: dict[str, Inert] = {
    **inert(
        "names where the file comes from", "_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "transformers_version"
    ),
    **inert("names where the file comes from", "unsloth_version", "unsloth_fixed"),
    **inert("a token of the tokenizer", "bos_token_id", "eos_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    **inert("a token of the tokenizer; no row of the embedding is special here", "pad_token_id"),
    **inert("names the tokenizer", "tokenizer_class"),
    **inert("a setting of generation, which has a file of its own", *GENERATION.split()),
    **inert("says what a call of transformers returns", "return_dict", "output_hidden_states", "output_attentions"),
    **inert("chooses an implementation of transformers", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    **inert("labels of a classifier", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    **inert("settings of transformers.js", "transformers.js_config"),
    **inert("of TorchScript and TensorFlow", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    **inert("a prompt of summarisation pipelines", "prefix"),
    **WHOLE_HEADS,
    "is_decoder": Inert("only decoders are served, and files of decoders say both"),
    "is_encoder_decoder": Inert("only decoders are served", (False,)),
    "add_cross_attention": Inert("only decoders are served", (False,)),
    "cross_attention_hidden_size": Inert("only decoders are served", (None,)),
    "tie_encoder_decoder": Inert("only decoders are served", (False,)),
    "chunk_size_feed_forward": Inert("the MLP runs whole", (0,)),
    "pruned_heads": Inert("no heads are pruned", (None, {})),
    "is_causal": Inert("attention is causal", (True,)),
    "attention_dropout": Inert("there is no dropout", (0, None)),
    "quantization_config": Inert("quantised checkpoints are not read", (None,)),
    "per_layer_config": Inert("layers with values of their own are not read", (None,)),
    "auto_map": Inert("code that a repository brings is never run", (None,)),
}


def take_dtype(keys: Keys) -> None:
    """Note the dtype of the weights in ``found_inert``, under one name for both of its keys."""
    new, old = keys.get("dtype", str | None), keys.get("torch_dtype", str | None)
    if new and old and new != old:
        raise ConfigError(f"dtype: is {new!r} while torch_dtype is {old!r}; expected one of the two, or both alike")
    if new or old:
        keys.found_inert[DTYPE] = new or old
