"""The frozen target: its context features, its labels, its greedy answers.

Shape letters: T packed tokens (padding included), B sequences, L context layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import GenerationConfig

from dflash.target.compiled import CompiledParts
from dflash.target.features import TargetFeatures, on_device
from dflash.target.load import TargetError, load_module, load_target_config, load_tokenizer

__all__ = ["Target", "TargetError", "load_target", "load_target_config", "load_tokenizer"]

P = ParamSpec("P")
R = TypeVar("R")

LAYER_LISTS = ("layers", "h", "blocks")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
SHAPE_FREE_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which plans anew for every [B, S]: each batch has its own, and a plan costs tens of milliseconds."""
LOGITS_BYTES = 1 << 28
"""Logits in memory at once while labels are made: 540 positions in bf16 at a vocabulary of 248,320."""


def untouched(method: Callable[P, R]) -> Callable[P, R]:
    """Run as the target would by itself: no gradients, and no autocast that the drafter's side may have switched on.

    no_grad, not inference_mode: autograd refuses to save inference tensors, and fc's backward needs the context.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]  # the target, or what runs it
        with torch.no_grad(), torch.autocast(owner.device.type, enabled=False):
            return method(*args, **kwargs)

    return run


def load_target(
    model: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: torch.device | str | Sequence[str],
    context_layers: Sequence[int],
    label_layer: int | Literal["final"] = "final",
) -> Target:
    """Load a target and its tokenizer, frozen.

    Args:
        model: hub id, folder, ``.gguf`` file (unpacked to ``dtype``), or ``package:NAME/FILE``: a folder or ``.gguf``
            file inside an installed Python package; ``random:`` before any of them draws the weights.
        revision: branch, tag or commit of a hub id.
        dtype: of weights and features.
        device: where the weights go, shard by shard; several: the layers are split over them, evenly and in order.
        context_layers, label_layer: as for :class:`Target`.

    Raises:
        TargetError: naming what is missing and what to do.
    """
    devices = [device] if isinstance(device, str | torch.device) else device
    module = load_module(model, revision, dtype, [torch.device(d) for d in devices])
    return Target(module, load_tokenizer(model, revision), context_layers, label_layer)


class Target:
    """A causal language model as the drafter's teacher: any transformers decoder with a layer list and a final norm.

    The module becomes this object's own: it is put in eval mode (dropout would make the labels random), frozen, and
    loses the sampling settings of its generation config. Construction runs four tokens through it and fails unless the
    pieces used here (decoder, final norm, head) choose what the model itself chooses.

    Args:
        module: a ``...ForCausalLM``, or a multimodal wrapper with a language model inside.
        tokenizer: its tokenizer; only asked for the end-of-text id. None: the generation config's ids are all.
        context_layers: decoder layers whose outputs are captured, in this order; ``l`` means ``hidden_states[l + 1]``.
        label_layer: ``final``, or the decoder layer whose output, past final norm and head, makes the labels.

    Raises:
        TargetError: a part is not found, a layer id does not fit, or the self-test fails.
    """

    def __init__(
        self, module: Any, tokenizer: Any, context_layers: Sequence[int], label_layer: int | Literal["final"] = "final"
    ) -> None:
        self.module, self.tokenizer = module.eval().requires_grad_(False), tokenizer
        self.config = module.config.get_text_config(decoder=True)
        self.decoder = module.get_decoder()
        self.layers: nn.ModuleList = _child(self.decoder, LAYER_LISTS, nn.ModuleList, "list of decoder layers")
        self.final_norm = _child(self.decoder, FINAL_NORMS, nn.Module, "final norm")
        head = module.get_output_embeddings()
        if head is None:
            raise TargetError(f"target.model: {type(module).__name__} has no head; name a causal language model")
        self.embed: nn.Module = module.get_input_embeddings()
        self.head_weight: Tensor = head.weight
        self.head_bias: Tensor | None = getattr(head, "bias", None)
        self.vocab_size, self.hidden_size = self.head_weight.shape
        self.num_layers = len(self.layers)
        self.device, self.dtype = self.head_weight.device, self.head_weight.dtype

        self.context_layers, self.label_layer = list(context_layers), label_layer
        label = self.num_layers - 1 if label_layer == "final" else label_layer
        unfit = [i for i in (*self.context_layers, label) if not 0 <= i < self.num_layers]
        if unfit or not self.context_layers or len({*self.context_layers, label}) <= len(self.context_layers):
            raise TargetError(
                f"target.context_layers {self.context_layers} and target.label_layer {label_layer} must be different "
                f"layers out of 0 to {self.num_layers - 1} (final is {self.num_layers - 1}), at least one context"
            )
        # Layers with a recurrent state: padding left of a prompt would enter it (older transformers do not mask it
        # everywhere), so such targets never see any.
        kinds = set(getattr(self.config, "layer_types", None) or ())
        self.hybrid = bool(kinds - ATTENTION) or bool(getattr(module, "_is_stateful", False))
        self.eos_ids = self._end_ids()
        # generate() fills what a call leaves open from here: temperature, repetition_penalty, suppressed tokens ...
        module.generation_config = self._generation_config()
        self.compiled: CompiledParts | None = None  # see dflash.target.compiled.choose_paths
        self._self_test()

    @property
    def parameter_count(self) -> int:
        """Weights of the whole target, all frozen."""
        return sum(p.numel() for p in self.module.parameters())

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the weights, from both ends of every tensor: tells fine-tunes under one name apart."""
        digest = hashlib.sha256()
        for name, parameter in self.module.named_parameters():
            flat = parameter.detach().flatten()
            digest.update(name.encode())
            digest.update(torch.cat([flat[:32], flat[-32:]]).float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    # ---- features and labels -----------------------------------------------------------------------------------------

    @untouched
    def capture(
        self,
        rows: Sequence[Any],
        loss_masks: Sequence[Any],
        sample_ids: Sequence[int],
        pad_to: int | None = None,
    ) -> TargetFeatures:
        """Run whole documents through the target and keep what training needs, packed end to end.

        Args:
            rows: B arrays of token ids, each one document from its first token on.
            loss_masks: B bool arrays, True where the token is one the target would have generated.
            sample_ids: B ids for messages and seeds.
            pad_to: T of the result; None: as many rows as tokens.

        Raises:
            TargetError: an empty row, an unknown token id, a mask of another length, or more tokens than ``pad_to``.
        """
        lengths = self._checked_lengths(rows, loss_masks, sample_ids, pad_to)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        total, longest = int(bounds[-1]), int(lengths.max())
        seq = np.repeat(np.arange(len(rows)), lengths)
        pos = np.arange(total) - bounds[seq]
        ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
        # One document per row: packed ones would leak into each other through convolutions and recurrent states.
        # Padding is to the right and no mask is passed: every mixer is causal, so padding cannot reach the tokens
        # before it, and attention keeps its fast path.
        padded_BS = np.zeros((len(rows), longest), dtype=np.int64)
        padded_BS[seq, pos] = ids
        real = self._on_device(seq * longest + pos, np.int64)
        loss_mask = np.concatenate([np.asarray(mask, dtype=bool) for mask in loss_masks])
        supervised = self._on_device(np.flatnonzero(loss_mask), np.int64)

        packed_rows = max(total, pad_to or 0)
        width = self.hidden_size
        context_TF = torch.zeros(packed_rows, width * len(self.context_layers), dtype=self.dtype, device=self.device)

        def keep(slot: int) -> Callable[[Tensor], None]:
            def write(hidden_BSD: Tensor) -> None:
                # Gathered where the layer lies, so that only the tokens cross over when layers are split.
                rows = hidden_BSD.flatten(0, 1)[real.to(hidden_BSD.device)]
                context_TF[:total, slot * width : (slot + 1) * width] = rows

            return write

        sinks = {layer: keep(slot) for slot, layer in enumerate(self.context_layers)}
        label_rows: list[Tensor] = []
        if self.label_layer != "final":
            sinks[self.label_layer] = lambda hidden_BSD: label_rows.append(
                hidden_BSD.flatten(0, 1)[real[supervised].to(hidden_BSD.device)]
            )
        parts = self.compiled.in_place() if self.compiled else nullcontext()
        with self.taps(sinks), sdpa_kernel(SHAPE_FREE_ATTENTION), parts:
            out = self.decoder(input_ids=self._on_device(padded_BS, np.int64), use_cache=False)
        if self.label_layer == "final":
            normed_TD = out.last_hidden_state.flatten(0, 1)[real[supervised]]  # past the final norm already
        else:
            normed_TD = self.final_norm(label_rows.pop())
        del out

        def packed(values: Any, dtype: Any, fill: int) -> Tensor:
            whole = np.full(packed_rows, fill, dtype=dtype)
            whole[:total] = values
            return self._on_device(whole, dtype)

        # A slot that counts has its label at a supervised position: the head is spared the prompts.
        labels = torch.full((packed_rows,), -1, dtype=torch.int32, device=self.device)
        labels[supervised] = self._choice(normed_TD)
        return TargetFeatures(
            ids=packed(ids, np.int64, 0),
            context=context_TF,
            labels=labels,
            loss_mask=packed(loss_mask, bool, 0),
            seq=packed(seq, np.int32, -1),
            pos=packed(pos, np.int64, 0),
            bounds=bounds.tolist(),
            sample_ids=[int(i) for i in sample_ids],
        )

    def _choice(self, normed_TD: Tensor) -> Tensor:
        """int32 [T]: the head's argmax, in chunks of tokens so that the logits never exist as a whole.

        Caps and positive scales that some models put on logits do not move an argmax.
        """
        chunk = max(1, LOGITS_BYTES // (self.vocab_size * normed_TD.element_size()))
        return torch.cat(
            [F.linear(part, self.head_weight, self.head_bias).argmax(dim=-1).int() for part in normed_TD.split(chunk)]
        )

    @contextmanager
    def taps(self, sinks: dict[int, Callable[[Tensor], None]]) -> Iterator[None]:
        """Hand the outputs of decoder layers to ``sinks`` while the context lasts; no hook outlives it."""
        handles = []
        try:
            for layer, sink in sinks.items():

                def hook(_module: Any, _args: Any, out: Any, sink: Callable[[Tensor], None] = sink) -> None:
                    sink(out[0] if isinstance(out, tuple) else out)

                handles.append(self.layers[layer].register_forward_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _checked_lengths(
        self, rows: Sequence[Any], loss_masks: Sequence[Any], sample_ids: Sequence[int], pad_to: int | None
    ) -> np.ndarray:
        if not len(rows) == len(loss_masks) == len(sample_ids) > 0:
            raise TargetError(
                f"{len(rows)} rows, {len(loss_masks)} masks, {len(sample_ids)} sample ids; give equally many"
            )
        for row, mask, sample in zip(rows, loss_masks, sample_ids, strict=True):
            if len(row) == 0 or len(row) != len(mask):
                raise TargetError(
                    f"sample {sample}: {len(row)} tokens and a loss mask of {len(mask)}; they must agree, at least 1"
                )
            if not 0 <= np.min(row) <= np.max(row) < self.vocab_size:
                raise TargetError(
                    f"sample {sample}: token ids {np.min(row)} to {np.max(row)}, but the target knows 0 to "
                    f"{self.vocab_size - 1}; tokenise with the target's own tokenizer"
                )
        lengths = np.array([len(row) for row in rows])
        if pad_to is not None and lengths.sum() > pad_to:
            raise TargetError(f"samples {list(sample_ids)}: {lengths.sum()} tokens in a batch of at most {pad_to}")
        return lengths

    def _on_device(self, values: Any, dtype: Any) -> Tensor:
        return on_device(np.ascontiguousarray(values, dtype=dtype), self.device)

    # ---- answers -----------------------------------------------------------------------------------------------------

    @untouched
    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int, progress: bool | None = None
    ) -> list[list[int]]:
        """The target's own greedy answers, in the order of the prompts.

        Args:
            prompts: token ids, generation prompt included.
            max_new_tokens: per answer.
            batch_size: prompts generated at once, at most. Hybrid targets batch prompts of equal length only.
            progress: show a bar; None: on a terminal.

        Returns:
            answer ids up to and including the first end-of-text token, where one came.
        """
        if empty := [i for i, prompt in enumerate(prompts) if len(prompt) == 0]:
            raise TargetError(f"prompt {empty[0]} is empty; there is nothing to answer")
        answers: list[list[int]] = [[] for _ in prompts]
        settings = self._generation_config(max_new_tokens=max_new_tokens, do_sample=False, use_cache=True)
        hide = None if progress is None else not progress
        with tqdm(total=len(prompts), desc="greedy answers", unit="prompt", disable=hide) as bar:
            for group in self._answer_groups([len(prompt) for prompt in prompts], batch_size):
                width = max(len(prompts[i]) for i in group)
                ids, mask = (np.zeros((len(group), width), dtype=np.int64) for _ in range(2))
                for row, i in enumerate(group):
                    ids[row, width - len(prompts[i]) :] = prompts[i]
                    mask[row, width - len(prompts[i]) :] = 1
                out = self.module.generate(
                    self._on_device(ids, np.int64),
                    attention_mask=self._on_device(mask, np.int64),
                    generation_config=settings,
                )
                for i, answer in zip(group, out[:, width:].tolist(), strict=True):
                    end = next((k + 1 for k, token in enumerate(answer) if token in self.eos_ids), len(answer))
                    answers[i] = answer[:end]
                bar.update(len(group))
        return answers

    def _answer_groups(self, lengths: list[int], batch_size: int) -> list[list[int]]:
        """Prompts of similar length together, the longest first, so that memory runs out at once or never."""
        groups: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            fits = groups and len(groups[-1]) < batch_size
            if not fits or (self.hybrid and lengths[groups[-1][0]] != lengths[i]):
                groups.append([])
            groups[-1].append(i)
        return groups

    def _end_ids(self) -> list[int]:
        """Every id that ends an answer: all of the generation config's, and the tokenizer's."""
        own = getattr(self.module.generation_config, "eos_token_id", None)
        ids = own if isinstance(own, list | tuple) else [own]
        return sorted({int(i) for i in (*ids, getattr(self.tokenizer, "eos_token_id", None)) if i is not None})

    def _generation_config(self, **settings: Any) -> Any:
        return GenerationConfig(eos_token_id=self.eos_ids or None, pad_token_id=(self.eos_ids or [0])[0], **settings)

    # ---- self-test ---------------------------------------------------------------------------------------------------

    @untouched
    def _self_test(self) -> None:
        """Refuse a model whose logits are not ``head(final norm(last layer))``: its labels would be another model's."""
        name = f"target.model: {type(self.module).__name__}"
        ids = torch.linspace(0, self.vocab_size - 1, 4, device=self.device).long()[None]
        own_V = self.module(input_ids=ids, use_cache=False).logits[0].float()
        if not bool(own_V.isfinite().all()):
            raise TargetError(
                f"{name} gives logits that are not finite; its weights are damaged, or overflow in {self.dtype}"
            )
        last: list[Tensor] = []
        with self.taps({self.num_layers - 1: last.append}):
            hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        eps = 8 * torch.finfo(self.dtype).eps  # rounding of the library's own kernels
        if not last[0].shape[-1] == hidden.shape[-1] == self.hidden_size:
            raise TargetError(
                f"{name} has layers {last[0].shape[-1]} wide, a head that reads {self.hidden_size}; they must be equal"
            )
        choice = self._choice(hidden[0]).long()
        short = own_V.amax(-1) - own_V.gather(-1, choice[:, None])[:, 0]
        if bool((short > eps * own_V.abs().amax(-1)).any()):
            raise TargetError(
                f"{name} does not choose the tokens that its final norm and head choose; no labels can be made with it"
            )
        if self.label_layer != "final":
            normed = self.final_norm(last.pop())
            if not torch.allclose(normed, hidden, rtol=eps, atol=eps * float(hidden.abs().max())):
                raise TargetError(
                    f"{name} does more than its final norm after the last layer; use target.label_layer: final"
                )


def _child(parent: nn.Module, names: Sequence[str], kind: type, what: str) -> Any:
    for name in names:
        if isinstance(child := getattr(parent, name, None), kind):
            return child
    raise TargetError(
        f"target.model: {type(parent).__name__} has no {what} under {', '.join(names)}; it has "
        f"{', '.join(name for name, _ in parent.named_children()) or 'no parts'}"
    )
