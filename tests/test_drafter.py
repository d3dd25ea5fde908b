"""The drafter against a per-block, per-slot reference written here in float64; and decoding against the training
pass."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from dflash.model import DFlashConfig, DFlashDraftModel, attention_masks, make_blocks

K, MASK, WINDOW = 4, 9, 6


def make(kinds=("sliding_attention", "full_attention", "sliding_attention"), seed=0, **over):
    shape = dict(
        block_size=K, mask_token_id=MASK, target_layer_ids=[0, 2], num_target_layers=4, vocab_size=50, hidden_size=32,
        intermediate_size=48, num_hidden_layers=len(kinds), num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=list(kinds), sliding_window=WINDOW, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    torch.manual_seed(seed)
    drafter = DFlashDraftModel(DFlashConfig(**(shape | over))).eval()
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.copy_(torch.rand_like(p) + 0.5 if "norm" in name else torch.randn_like(p) * 0.3)
    return drafter


def batch(seed=0, lengths=(11, 5, 8), padding=3):
    g = torch.Generator().manual_seed(seed)
    T = sum(lengths) + padding
    seq = torch.tensor([b for b, n in enumerate(lengths) for _ in range(n)] + [-1] * padding, dtype=torch.int32)
    pos = torch.tensor([p for n in lengths for p in range(n)] + [0] * padding)
    ids = torch.randint(0, 50, (T,), generator=g)
    return ids, ids.int(), torch.ones(T, dtype=torch.bool), seq, pos, torch.randn(T, 64, generator=g)


def training_pass(drafter, embed, data, anchors):
    ids, labels, mask, seq, pos, context = data
    blocks = make_blocks(ids, labels, mask, seq, pos, torch.tensor(anchors), K, MASK)
    masks = attention_masks(
        drafter.config.layer_types,
        drafter.config.sliding_window,
        K,
        seq,
        pos,
        blocks.seq_N,
        blocks.anchor_pos_N,
        flex=False,
    )
    out = drafter(
        noise_embeds=embed[blocks.input_ids_NK.flatten()][None],
        context_hidden_states=context[None],
        position_ids=torch.cat([pos, blocks.position_NK.flatten()])[None],
        attention_mask=masks,
    ).last_hidden_state
    return out[0].unflatten(0, (-1, K))


def reference_block(drafter, embed, ids, context, a):
    """Hidden states [K, D] of one block anchored at position a of one document, everything written out, float64."""
    w = {name: p.detach().double() for name, p in drafter.named_parameters()}
    c = drafter.config
    H, G, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight

    def rope(x, position):
        half = d // 2
        out = x.clone()
        for i in range(half):
            angle = torch.tensor(position / 100.0 ** (2 * i / d), dtype=torch.float64)
            out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return out

    ctx = norm(context.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = embed[torch.tensor([int(ids[a])] + [MASK] * (K - 1))].double()
    for layer, kind in enumerate(c.layer_types):
        p = f"layers.{layer}."
        h = norm(x, w[p + "input_layernorm.weight"])
        keys = [(t, ctx[t]) for t in range(a)] + [(a + k, h[k]) for k in range(K)]
        out = torch.zeros(K, H * d, dtype=torch.float64)
        for k in range(K):
            for head in range(H):
                group = head // (H // G)
                rows, cols = slice(head * d, head * d + d), slice(group * d, group * d + d)
                q = norm(h[k] @ w[p + "self_attn.q_proj.weight"].T[:, rows], w[p + "self_attn.q_norm.weight"])
                q = rope(q, a + k)
                scores, values = [], []
                for j, (position, source) in enumerate(keys):
                    in_block = j >= a
                    if kind == "sliding_attention" and (
                        (in_block and j - a > k) or (not in_block and position <= a + k - WINDOW)
                    ):
                        continue
                    key = norm(source @ w[p + "self_attn.k_proj.weight"].T[:, cols], w[p + "self_attn.k_norm.weight"])
                    scores.append(q @ rope(key, position) / d**0.5)
                    values.append(source @ w[p + "self_attn.v_proj.weight"].T[:, cols])
                out[k, rows] = torch.softmax(torch.stack(scores), 0) @ torch.stack(values)
        x = x + out @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])


def test_packed_overlapping_blocks_equal_the_written_out_reference():
    drafter, data = make(), batch()
    embed = torch.randn(50, 32, generator=torch.Generator().manual_seed(3))
    # Sequence starts and ends, neighbours, the same anchor twice, an unused block; rows 11 and 16 start documents.
    anchors = [0, 1, 2, 7, 8, 10, 11, 12, 15, 16, 23, 23, -1]
    with torch.no_grad():
        got = training_pass(drafter, embed, data, anchors)
    ids, context, starts = data[0], data[5], (0, 11, 16, 24)
    for n, row in enumerate(anchors[:-1]):
        b = max(i for i in range(3) if starts[i] <= row)
        own = slice(starts[b], starts[b + 1])
        want = reference_block(drafter, embed, ids[own], context[own], row - starts[b])
        assert torch.allclose(got[n].double(), want, atol=2e-5), (n, row)
    assert bool(torch.isfinite(got[-1]).all())


def test_a_block_does_not_depend_on_the_others():
    drafter, data = make(seed=4), batch(seed=5)
    embed = torch.randn(50, 32)
    with torch.no_grad():
        together = training_pass(drafter, embed, data, [3, 6, 14, 20])
        alone = training_pass(drafter, embed, data, [14])
        other = list(data)
        other[5] = data[5].clone()
        other[5][:11] += 1.0  # another document's features
        other[5][14:] += 1.0  # its own features from the anchor on, which it must not see
        changed = training_pass(drafter, embed, tuple(other), [14])
    assert torch.allclose(together[2], alone[0], atol=1e-6)
    assert torch.equal(changed, alone)


def test_gradients_reach_every_parameter_and_nothing_else():
    drafter, data = make(), batch()
    embed = torch.randn(50, 32, requires_grad=True)
    data[5].requires_grad_()
    training_pass(drafter, embed.detach(), data, [2, 13]).pow(2).sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in drafter.parameters())
    assert embed.grad is None


@pytest.mark.parametrize(
    "kinds", [("full_attention",) * 2, ("sliding_attention", "full_attention"), ("sliding_attention",) * 2]
)
def test_decoding_with_transformers_cache_equals_the_training_pass(kinds):
    """Round after round: context arrives in pieces, the block is cropped, sliding layers drop what left the window."""
    cache_class = pytest.importorskip("transformers.cache_utils", reason="").__dict__.get("DFlashCache")
    if cache_class is None:
        pytest.skip("transformers has no DFlashCache before 5.24")
    drafter, data = make(kinds), batch(lengths=(20,), padding=0)
    embed = torch.randn(50, 32)
    ids, context = data[0], data[5]
    cache = cache_class(config=drafter.config)
    cache.activate_past_recording()
    seen = 0
    for a in (3, 4, 8, 13, 17, 19):
        new = a - seen
        cache.set_previous_accepted_tokens(new)
        if seen:
            cache.crop(-K)
        with torch.no_grad():
            live = drafter(
                noise_embeds=embed[torch.tensor([int(ids[a])] + [MASK] * (K - 1))][None],
                context_hidden_states=context[None, seen:a],
                position_ids=torch.arange(seen, a + K)[None],
                attention_mask=torch.ones(1, a + K, dtype=torch.long),
                cache=cache,
            ).last_hidden_state[0]
            want = training_pass(drafter, embed, data, [a])[0]
        assert torch.allclose(live, want, atol=1e-5), a
        seen = a


def test_saved_folder_is_a_published_drafter(tmp_path):
    """Names, shapes and config fields as facts of the field have them; loads back to the same logits, strictly."""
    drafter = make(("sliding_attention",) * 4 + ("full_attention",))
    drafter.save_pretrained(tmp_path)
    names = {n for n, _ in drafter.named_parameters()}
    per_layer = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + [f"self_attn.{x}_norm.weight" for x in "qk"]
    per_layer += [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    per_layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    assert names == {f"layers.{i}.{x}" for i in range(5) for x in per_layer} | {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    assert len(names) == 58
    assert {n for n, _ in drafter.named_buffers()} == set()
    back, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    embed, data = torch.randn(50, 32), batch()
    with torch.no_grad():
        assert torch.equal(
            training_pass(back.eval(), embed, data, [5, 20]), training_pass(drafter, embed, data, [5, 20])
        )
    config = back.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (K, MASK, [0, 2])
    assert config.dflash_config == {"block_size": K, "mask_token_id": MASK, "target_layer_ids": [0, 2]}
    assert config.model_type == "qwen3" and config.architectures == ["DFlashDraftModel"]
    assert config.use_sliding_window and config.sliding_window == WINDOW
    assert config.to_dict()["rope_theta"] == 100.0 and config.rope_parameters["rope_theta"] == 100.0


def test_published_config_spellings_are_read():
    nested = DFlashConfig(
        block_size=16, dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 2]}, rope_theta=1e7,
        num_hidden_layers=1, layer_types=["full_attention"],
    )  # fmt: skip
    assert (nested.mask_token_id, nested.target_layer_ids, nested.rope_parameters["rope_theta"]) == (7, [1, 2], 1e7)
    with pytest.raises(ValueError, match="mask_token_id is 3 at top level and 7"):
        DFlashConfig(mask_token_id=3, dflash_config={"mask_token_id": 7})
    with pytest.raises(ValueError, match="lacks block_size, target_layer_ids"):
        DFlashDraftModel(DFlashConfig(mask_token_id=3, num_hidden_layers=1))
    for bad, word in ((dict(block_size=1), "block_size"), (dict(sliding_window=2), "sliding_window")):
        with pytest.raises(ValueError, match=word):
            make(**bad)


def test_rope_stays_fp32_in_a_bf16_drafter_and_long_range_survives():
    drafter = make(max_position_embeddings=1 << 20)
    half = copy.deepcopy(drafter).to(torch.bfloat16)
    far = torch.arange(200_000, 200_004)[None]
    assert torch.equal(half.rotary(far)[0], drafter.rotary(far)[0])
    assert half.rotary.inv_freq.dtype == torch.float32
    assert isinstance(half, PreTrainedModel)


def test_norms_return_their_inputs_dtype_under_fp32_weights():
    drafter = make()
    x = torch.randn(2, 32).bfloat16()
    assert drafter.norm(x).dtype == torch.bfloat16
    want = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * drafter.norm.weight
    assert torch.allclose(drafter.norm(x).float(), want, rtol=1e-2)
