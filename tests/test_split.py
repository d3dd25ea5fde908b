"""A target whose layers several devices share: what lies where, and the same features as on one.

A machine without GPUs has one device. So the numbers are compared with accelerate's hooks around every part but all of
it on the CPU, and what must lie on one device to be computed is checked with tensors that have a device and no values.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from tiny import qwen35_config, tiny_gemma2, tiny_llama, tiny_phi, tiny_qwen35
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from dflash.target.load import TargetError, split
from dflash.target.model import Target
from dflash.target.remote import RemoteTarget, describe

CPU = torch.device("cpu")
ROWS = [np.random.default_rng(0).integers(6, 190, length) for length in (9, 17, 5)]
MASKS = [np.arange(len(row)) > 2 for row in ROWS]


GPUS = [torch.device("cuda", i) for i in range(3)]


@pytest.mark.parametrize("made", [tiny_llama(0).config, qwen35_config(), tiny_gemma2(0).config])
@pytest.mark.parametrize("count", [2, 3])
def test_a_split_places_every_weight_once_and_layers_in_order(made, count):
    place = split(AutoModelForCausalLM, made, GPUS[:count])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(made)
    where = {}
    for name, _ in [*module.named_parameters(), *module.named_buffers()]:
        owners = [key for key in place if name == key or name.startswith(f"{key}.")]
        assert len(owners) == 1, name
        where[name] = place[owners[0]].index
    layers = [place[f"model.layers.{i}"].index for i in range(made.num_hidden_layers)]
    assert layers == sorted(layers) and set(layers) == set(range(count))
    assert max(map(layers.count, layers)) - min(map(layers.count, layers)) <= 1
    assert place["model.embed_tokens"].index == 0
    behind = 0 if made.tie_word_embeddings else count - 1  # a tied head lies with the embedding it is
    assert place["lm_head"].index == behind and place["model.norm"].index == behind


def test_more_devices_than_layers_are_refused():
    with pytest.raises(TargetError, match="4 layers that 5 devices could share"):
        split(AutoModelForCausalLM, tiny_llama(0).config, [torch.device("cuda", i) for i in range(5)])


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2, tiny_phi, tiny_qwen35])
@pytest.mark.parametrize("label_layer", ["final", 1])
def test_a_split_target_captures_and_answers_as_a_whole_one(make, label_layer):
    module = make(0)
    parts = dispatch_model(
        make(0), split(AutoModelForCausalLM, module.config, [CPU, CPU]), force_hooks=True,
        skip_keys=module._skip_keys_device_placement,
    )  # fmt: skip
    whole, shared = (Target(m, None, [0, 2], label_layer) for m in (module, parts))
    assert all("forward" in vars(part) for part in (*shared.layers, shared.final_norm, shared.embed))  # are hooked
    one, two = (target.capture(ROWS, MASKS, [4, 5, 6], pad_to=40) for target in (whole, shared))
    for name, tensor in vars(one).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, getattr(two, name)), name
    prompts = [row.tolist() for row in ROWS]
    assert whole.greedy(prompts, 6, 2, progress=False) == shared.greedy(prompts, 6, 2, progress=False)
    assert whole.fingerprint == shared.fingerprint
    # What drafters borrow leaves the hooks behind.
    remote = RemoteTarget(describe(shared), shared.config, None, 0, torch.float32, CPU)
    remote.embed.weight.data.copy_(whole.embed.weight)
    assert torch.equal(remote.embed(torch.arange(190)), whole.embed(torch.arange(190)))


def pretend_two_gpus():
    """A backend of two devices that has no kernels: FakeTensor needs none, and refuses to mix devices."""
    from torch.utils import backend_registration

    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16, torch.float16]

        def device_count(self):
            return 2

    backend_registration._setup_privateuseone_for_python_backend("gpu", Backend())
    return [torch.device("gpu", i) for i in range(2)]


class StrictIndices(TorchFunctionMode):
    """Indices lie with what they index, or on the CPU, and what is written through them too: no fake tensor minds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            tensors = [part for part in at if isinstance(part, torch.Tensor)]
            written = [value for value in args[2:] if tensors and isinstance(value, torch.Tensor)]
            here = str(args[0].device)
            if odd := {str(t.device) for t in tensors} - {here, "cpu"} | {str(t.device) for t in written} - {here}:
                raise RuntimeError(f"{here} is indexed by {odd}")
        return func(*args, **(kwargs or {}))


def captured_on_two(config, label_layer, gpus, hooked=True):
    """Where a batch of a target shared by two devices lies; raises where an operation would mix devices."""
    place = split(AutoModelForCausalLM, config, gpus)
    # Without attention kernels for such a backend: plain operations.
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, device in place.items():
        for part in module.get_submodule(name).modules():
            for key, old in part._parameters.items():
                new = None if old is None else torch.empty(old.shape, device=device)
                part._parameters[key] = None if new is None else torch.nn.Parameter(new, requires_grad=False)
            for key, old in part._buffers.items():
                part._buffers[key] = None if old is None else torch.empty(old.shape, dtype=old.dtype, device=device)
    module.tie_weights()
    if hooked:
        dispatch_model(module, place, skip_keys=module._skip_keys_device_placement)
    verdicts = iter([True, False])  # of the self-test, which looks at values: finite, and no token chosen otherwise
    FakeTensor.__bool__ = lambda _: next(verdicts)
    if label_layer != "final":  # it compares numbers then
        Target._self_test = lambda _: None
    features = Target(module, None, [0, 2], label_layer).capture(ROWS, MASKS, [4, 5, 6], pad_to=40)
    assert features.context.shape == (40, 64)
    return {str(value.device) for value in vars(features).values() if isinstance(value, torch.Tensor)}


def on_two_devices():
    """Run in a process of its own: a backend is registered for good."""
    import accelerate.big_modeling

    gpus = pretend_two_gpus()
    accelerate.big_modeling.find_tied_parameters = lambda _: []  # it compares addresses, which are all 0 here
    configs = (tiny_llama(0).config, tiny_gemma2(0).config, qwen35_config())
    with FakeTensorMode(allow_non_fake_inputs=True), StrictIndices():
        for label_layer in ("final", 1):
            for config in configs:
                head = "gpu:0" if config.tie_word_embeddings else "gpu:1"
                assert captured_on_two(config, label_layer, gpus) == {head}, (config.model_type, label_layer)
        try:
            captured_on_two(configs[0], 1, gpus, hooked=False)
        except RuntimeError as error:
            assert "gpu:0" in str(error) and "gpu:1" in str(error), error
        else:
            raise AssertionError("nothing moved the layers' inputs, and nothing was refused")
    print("as it should")


def test_nothing_mixes_devices_and_features_lie_with_the_head():
    command = [sys.executable, "-c", "import test_split; test_split.on_two_devices()"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("as it should\n"), done.stderr
