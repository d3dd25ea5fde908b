"""What is compiled on a GPU (flex attention, its block mask, the fused loss) gives what the CPU's plain code gives."""

import pytest
import torch
from test_drafter import MASK, K, make

from dflash.bench.shapes import SHAPES
from dflash.bench.step import build
from dflash.loss import frozen_head_loss, read_logits
from dflash.model import attention_masks, make_blocks
from dflash.train.adamw import AdamW
from dflash.train.muon import Muon
from dflash.train.probe import choose_paths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def packed(lengths, padding, width):
    g = torch.Generator().manual_seed(0)
    rows = sum(lengths) + padding
    seq = torch.tensor([b for b, n in enumerate(lengths) for _ in range(n)] + [-1] * padding, dtype=torch.int32)
    pos = torch.tensor([p for n in lengths for p in range(n)] + [0] * padding)
    ids = torch.randint(0, 50, (rows,), generator=g)
    return ids, ids.int(), seq >= 0, seq, pos, torch.randn(rows, width, generator=g)


def run(drafter, embed, head, data, anchors, device):
    drafter, embed, head = drafter.to(device), embed.to(device), head.to(device)
    ids, labels, mask, seq, pos, context = (x.to(device) for x in data)
    blocks = make_blocks(ids, labels, mask, seq, pos, anchors.to(device), K, MASK)
    masks = attention_masks(
        drafter.config.layer_types, drafter.config.sliding_window, K, seq, pos, blocks.seq_N, blocks.anchor_pos_N,
        flex=device == "cuda",
    )  # fmt: skip
    hidden = drafter(
        noise_embeds=embed[blocks.input_ids_NK.flatten()][None],
        context_hidden_states=context[None],
        position_ids=torch.cat([pos, blocks.position_NK.flatten()])[None],
        attention_mask=masks,
    ).last_hidden_state[0]
    counted = blocks.counted_NJ
    slots = hidden.unflatten(0, (-1, K))[:, 1:][counted]
    ce, rank = frozen_head_loss(slots, head, blocks.labels_NJ[counted])
    drafter.zero_grad()
    ce.sum().backward()
    return (
        hidden.detach().cpu(),
        ce.detach().cpu(),
        rank.cpu(),
        {n: p.grad.cpu().clone() for n, p in drafter.named_parameters()},
    )


def test_compiled_step_equals_the_cpus():
    # Flex attention's kernels want heads of at least 16.
    drafter = make(("sliding_attention", "full_attention"), head_dim=16, sliding_window=40)
    embed, head = torch.randn(50, 32), torch.randn(50, 32)
    for lengths in ((200, 90, 131), (77, 300, 9)):  # the second batch must not meet what was compiled for the first
        data = packed(lengths, 90, 64)
        anchors = torch.sort(torch.randperm(sum(lengths))[:61]).values
        anchors = torch.cat([anchors, torch.full((3,), -1)])
        want = run(drafter, embed, head, data, anchors, "cpu")
        got = run(drafter, embed, head, data, anchors, "cuda")
        used = (anchors >= 0).repeat_interleave(K)
        assert torch.allclose(want[0][used], got[0][used], atol=1e-3, rtol=1e-3)
        assert torch.allclose(got[1], want[1], atol=1e-3)
        assert (got[2] == want[2]).float().mean() > 0.99  # rounding may swap near-equal logits
        for name, grad in want[3].items():
            assert torch.allclose(got[3][name], grad, atol=1e-3 * float(grad.abs().max()) + 1e-6, rtol=1e-2), name
        drafter.to("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [50, 9001])
def test_loss_kernel_equals_the_plain_reading_of_logits(dtype, vocab):
    kernels = pytest.importorskip("dflash.kernels")
    g = torch.Generator("cuda").manual_seed(0)
    logits = (torch.randn(33, vocab, generator=g, device="cuda") * 3).to(dtype)
    label = torch.randint(0, vocab, (33,), generator=g, device="cuda")
    logits[torch.arange(8), (label[:8] + 1) % vocab] = logits[torch.arange(8), label[:8]]  # ties, before and behind
    logits[8, label[8]] = 60.0  # all but sure: the slope is the rest of the probability
    want = read_logits(logits.clone(), label, slope=True)
    assert torch.equal(kernels.read_logits(logits.clone(), label, slope=False)[2], logits)
    got = kernels.read_logits(logits, label, slope=True)
    assert torch.allclose(got[0], want[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1], want[1])
    step = torch.finfo(dtype).eps  # of rounding to the logits' dtype; fp32 sums in another order
    assert torch.allclose(got[2].float(), want[2].float(), rtol=4 * step, atol=1e-6)


@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test_a_step_is_launched_without_waiting_for_the_device(optimizer):
    """Else the next step could not be given to it while it works on the last."""
    device = torch.device("cuda")
    t = build(SHAPES["smollm2"], 1024, 64, device, torch.bfloat16, 1)
    for layer in t.drafter.layers:
        layer.dropout = 0.1
    t.optimizer = optimizer(t.drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    choose_paths(t)
    # The first two steps in flight at once allocate the memory that all later ones share, and allocating waits.
    for first, mode in ((1, "default"), (3, "default"), (5, "error")):
        torch.cuda._sleep(10_000_000_000)  # some five seconds of nothing, before the step's own work
        torch.cuda.set_sync_debug_mode(mode)  # "error" raises at most of what would wait
        try:
            launched, after = t.launch(first), t.launch(first + 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waited = torch.cuda.current_stream().query()
        assert t.finish(launched)["step"] == first and t.finish(after)["step"] == first + 1
    assert not waited
