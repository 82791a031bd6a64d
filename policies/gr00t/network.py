"""GR00T N1.7 as three graphs. B rows, P packed patches, N pictures, S prompt tokens, T = 1 + horizon action tokens, W wide."""

from __future__ import annotations

from vla_eval.engines.blocks import (
    Rope,
    gated_mlp,
    heads,
    joined,
    layer_norm,
    linear,
    modulated,
    rope_from_table,
    rotate,
    scaled_linear,
    segments,
    split_linear,
)  # fmt: skip
from vla_eval.engines.graph import Dim, Graph, Value
from vla_eval.engines.weights import Tensor, Weights

from .configuration import TEXT, VISUAL, Architecture, Text, Vision

VL_EPS = 1e-5  # of the VL LayerNorm and its refinement blocks
DIT_EPS = 1e-5
DIT_OUT_EPS = 1e-6
SPLIT = 4  # parts of the sums of the DiT's narrow products: the 41 rows of one robot leave most of a GPU idle; with more, parts cost


def visual(g: Graph, a: Architecture, w: Weights, patches: Dim, bounds: Dim) -> None:
    """Packed patches -> merged picture tokens [P / merge², text width] and one DeepStack feature per tap. `bounds` is N + 1 long."""
    v, w = a.vision, w.under(VISUAL)
    x = g.input("input", g.dtype, (patches, v.patch_values))
    angles = g.input("rotary_pos_emb", "float32", (patches, v.head_dim // 2))
    ends = g.input("cu_seqlens", "int32", (bounds,))
    corners = g.input("fast_pos_embed_idx", "int64", (4, patches))  # rows of the position table around each patch
    shares = g.input("fast_pos_embed_weight", g.dtype, (4, patches))

    kernel = w["patch_embed.proj.weight"].reshaped((v.hidden, v.patch_values))
    x = g.label(g.linear(x, kernel, w["patch_embed.proj.bias"]), "vision.patch_embed")
    around = g.gather(g.weight(w["pos_embed.weight"]), corners)  # [4, P, hidden]
    place = g.sum(g.mul(around, g.reshape(shares, (4, -1, 1))), 0)
    x = g.label(g.add(g.reshape(x, (1, -1, v.hidden)), place), "vision.block_input")  # [1, P, hidden]

    angles = g.reshape(angles, (1, 1, -1, v.head_dim // 2))
    rope = Rope(g.label(g.cos(angles), "vision.rope_cos"), g.label(g.sin(angles), "vision.rope_sin"))
    same_picture = segments(g, g.reshape(x, (-1, v.hidden)), ends)
    for i in range(v.depth):
        x = vision_block(g, x, w.under("blocks").under(i), v, rope, same_picture, f"vision.block_{i:02d}")
        if i in v.deepstack_after_blocks:
            tap = v.deepstack_after_blocks.index(i)
            g.output(deepstack_merger(g, x, w.under("deepstack_merger_list").under(tap), v), f"deepstack_features_{tap}")
    g.output(merger(g, x, w.under("merger"), v), "output")


def vision_block(g: Graph, x: Value, w: Weights, v: Vision, rope: Rope, same_picture: Value, name: str) -> Value:  # [1, P, D]
    qkv = linear(g, layer_norm(g, x, w.under("norm1"), eps=v.layer_norm_eps), w.under("attn.qkv"))
    q, k, value = (heads(g, g.slice(qkv, 2, i * v.hidden, (i + 1) * v.hidden), v.head_dim) for i in range(3))
    q, k = g.label(rotate(g, q, rope), f"{name}_q_rotated"), g.label(rotate(g, k, rope), f"{name}_k_rotated")
    seen = joined(g, g.attention(q, k, value, scale=v.head_dim**-0.5, mask=same_picture))
    x = g.add(x, linear(g, seen, w.under("attn.proj")))
    hidden = g.gelu_tanh(linear(g, layer_norm(g, x, w.under("norm2"), eps=v.layer_norm_eps), w.under("mlp.linear_fc1")))
    return g.label(g.add(x, linear(g, hidden, w.under("mlp.linear_fc2"))), name)


def merger(g: Graph, x: Value, w: Weights, v: Vision) -> Value:
    """Norm, then merge² neighbours side by side: [1, P, hidden] -> [P / merge², out]."""
    wide = g.reshape(layer_norm(g, x, w.under("norm"), eps=v.layer_norm_eps), (-1, v.merge**2 * v.hidden))
    return linear(g, g.gelu(linear(g, wide, w.under("linear_fc1"))), w.under("linear_fc2"))


def deepstack_merger(g: Graph, x: Value, w: Weights, v: Vision) -> Value:
    """Neighbours side by side first, then the norm."""
    wide = layer_norm(g, g.reshape(x, (-1, v.merge**2 * v.hidden)), w.under("norm"), eps=v.layer_norm_eps)
    return linear(g, g.gelu(linear(g, wide, w.under("linear_fc1"))), w.under("linear_fc2"))


def vl_backbone(g: Graph, a: Architecture, w: Weights, batch: Dim, tokens: Dim) -> None:
    """Prompt embeddings with picture tokens in place -> keys and values that the DiT's even blocks attend to.

    DeepStack inputs are added whole: the caller keeps them zero outside picture tokens.
    """
    t = a.text
    x = g.input("inputs_embeds", g.dtype, (batch, tokens, t.hidden))
    table = g.input("rope_rotary_cos_sin", "float32", (batch, tokens, t.head_dim))  # cosines | sines, in token order
    rows = g.input("attention_pos_id", "int32", (batch, tokens))  # of the table with its rows laid end to end
    taps = [g.input(f"deepstack_embeds_{k}", g.dtype, (batch, tokens, t.hidden)) for k in range(len(a.vision.deepstack_after_blocks))]

    rope = rope_from_table(g, g.reshape(table, (-1, t.head_dim)), rows)
    for i in range(t.layers_kept):
        x = text_layer(g, x, w.under(f"{TEXT}.layers").under(i), t, rope, f"text.layer_{i:02d}")
        if i < len(taps):
            x = g.label(g.add(x, taps[i]), f"text.layer_{i + 1:02d}_input")
    # no final norm: the DiT was trained on the last kept layer as it is

    head = w.under("action_head")
    x = g.label(layer_norm(g, x, head.under("vlln"), eps=VL_EPS), "vl.after_vlln")
    for i in range(a.vl_layers):
        x = vl_block(g, x, head.under("vl_self_attention.transformer_blocks").under(i), a, f"vl.block_{i}")

    for i in a.cross_blocks:
        attention = head.under(f"model.transformer_blocks.{i}.attn1")
        for letter, name in (("k", "to_k"), ("v", "to_v")):
            split = g.reshape(linear(g, x, attention.under(name)), (0, 0, a.dit_heads, a.dit_head_dim))
            g.output(split, f"cross_{letter}_layer{i:02d}")


def text_layer(g: Graph, x: Value, w: Weights, t: Text, rope: Rope, name: str) -> Value:  # [B, S, D]
    y, attention = g.rms_norm(x, w["input_layernorm.weight"], eps=t.rms_norm_eps), w.under("self_attn")
    q = per_head_norm(g, linear(g, y, attention.under("q_proj")), attention.under("q_norm"), t, f"{name}_q")
    k = per_head_norm(g, linear(g, y, attention.under("k_proj")), attention.under("k_norm"), t, f"{name}_k")
    q, k = g.label(rotate(g, q, rope), f"{name}_q_rotated"), g.label(rotate(g, k, rope), f"{name}_k_rotated")
    value = heads(g, linear(g, y, attention.under("v_proj")), t.head_dim)
    seen = joined(g, g.attention(q, k, value, scale=t.head_dim**-0.5, causal=True))
    x = g.add(x, linear(g, seen, attention.under("o_proj")))
    y = g.rms_norm(x, w["post_attention_layernorm.weight"], eps=t.rms_norm_eps)
    return g.label(g.add(x, gated_mlp(g, y, w.under("mlp"), g.silu)), f"{name}_output")


def per_head_norm(g: Graph, x: Value, w: Weights, t: Text, name: str) -> Value:  # [B, S, H * D] -> [B, H, S, D]
    return g.label(g.rms_norm(heads(g, x, t.head_dim), w["weight"], eps=t.rms_norm_eps), f"{name}_norm")


def vl_block(g: Graph, x: Value, w: Weights, a: Architecture, name: str) -> Value:
    """Every token sees every token, pictures and text alike: no mask, no positions."""
    y, attention = layer_norm(g, x, w.under("norm1"), eps=VL_EPS), w.under("attn1")
    q, k, v = (heads(g, linear(g, y, attention.under(part)), a.vl_head_dim) for part in ("to_q", "to_k", "to_v"))
    seen = joined(g, g.attention(q, k, v, scale=a.vl_head_dim**-0.5))
    x = g.add(x, linear(g, seen, attention.under("to_out.0")))
    return g.label(g.add(x, feed_forward(g, layer_norm(g, x, w.under("norm3"), eps=VL_EPS), w.under("ff"))), name)


def action(g: Graph, a: Architecture, w: Weights, slot: int, batch: Dim, tokens: Dim) -> None:
    """One denoise step: the velocity at a noisy trajectory. What depends on the time alone comes in as two constant tables' rows."""
    w = w.under("action_head")
    noise = g.input("noise_trajectory", "float32", (batch, a.horizon, a.action_dim))
    state = g.input("state", "float32", (batch, 1, a.state_dim))
    modulation = g.input("adanorm_modulation", g.dtype, (a.dit_layers + 1, 2 * a.width))
    time_bias = g.input("action_time_bias", g.dtype, (a.width,))
    seen = {name: g.input(f"{name}_attention_mask", "bool", (batch, 1, 1, tokens)) for name in ("text", "image")}
    context = {
        i: [g.input(f"cross_{letter}_layer{i:02d}", g.dtype, (batch, tokens, a.dit_heads, a.dit_head_dim)) for letter in "kv"]
        for i in a.cross_blocks
    }

    x = g.concat([encoded_state(g, state, w, slot), encoded_action(g, noise, time_bias, w, a, slot)], 1)  # [B, T, W]
    x, parts = g.label(x, "step.dit_tokens"), SPLIT if batch == 1 else 1
    for i in range(a.dit_layers):
        block, row = w.under("model.transformer_blocks").under(i), g.slice(modulation, 0, i, i + 1)
        if i in a.cross_blocks:
            k, v = (g.transpose(part, (0, 2, 1, 3)) for part in context[i])
            x = cross_block(g, x, block, a, row, k, v, seen["text" if i % (2 * a.text_every) == 0 else "image"], parts)
        else:
            x = self_block(g, x, block, a, row, parts)
        ff = block.under("ff")
        hidden = g.gelu_tanh(linear(g, g.layer_norm(x, eps=DIT_EPS), ff.under("net.0.proj")))
        x = g.label(g.add(x, split_linear(g, hidden, ff.under("net.2"), parts)), f"step.block_{i:02d}")

    shift, scale = halves(g, g.slice(modulation, 0, a.dit_layers, a.dit_layers + 1))  # the other order than in the blocks
    x = g.label(linear(g, modulated(g, x, scale, shift, eps=DIT_OUT_EPS), w.under("model.proj_out_2")), "step.dit_output")
    velocity = two_layers(g, g.slice(x, 1, 1, 1 + a.horizon), w.under("action_decoder"), slot)
    g.output(g.cast(velocity, "float32"), "velocity")


def encoded_state(g: Graph, state: Value, w: Weights, slot: int) -> Value:  # [B, 1, state] -> [B, 1, W]
    return g.label(two_layers(g, g.cast(state, g.dtype), w.under("state_encoder"), slot), "head.state_features")


def encoded_action(g: Graph, noise: Value, time_bias: Value, w: Weights, a: Architecture, slot: int) -> Value:  # -> [B, horizon, W]
    encoder = w.under("action_encoder")
    x = by_slot(g, g.cast(noise, g.dtype), encoder.under("W1"), slot)
    upper = encoder["W2.W"].row(slot).rows(0, a.width)  # the lower half takes the time, and is in `time_bias` with the bias
    x = g.silu(g.add(g.linear(x, upper.transposed()), time_bias))
    x = g.label(by_slot(g, x, encoder.under("W3"), slot), "step.action_encoded")
    return g.add(x, g.weight(w["position_embedding.weight"].rows(0, a.horizon)))


def cross_block(g: Graph, x: Value, w: Weights, a: Architecture, row: Value, k: Value, v: Value, mask: Value, parts: int) -> Value:
    scale, shift = halves(g, row)
    y, attention = modulated(g, x, scale, shift, eps=DIT_EPS), w.under("attn1")
    q = heads(g, scaled_linear(g, y, attention.under("to_q"), a.dit_head_dim**-0.5), a.dit_head_dim)
    seen = joined(g, g.attention(q, k, v, scale=1.0, mask=mask))
    return g.add(x, split_linear(g, seen, attention.under("to_out.0"), parts))


def self_block(g: Graph, x: Value, w: Weights, a: Architecture, row: Value, parts: int) -> Value:
    scale, shift = halves(g, row)
    y, attention = modulated(g, x, scale, shift, eps=DIT_EPS), w.under("attn1")
    q = heads(g, scaled_linear(g, y, attention.under("to_q"), a.dit_head_dim**-0.5), a.dit_head_dim)
    k, v = (heads(g, linear(g, y, attention.under(part)), a.dit_head_dim) for part in ("to_k", "to_v"))
    seen = joined(g, g.attention(q, k, v, scale=1.0))
    return g.add(x, split_linear(g, seen, attention.under("to_out.0"), parts))


def feed_forward(g: Graph, x: Value, w: Weights) -> Value:
    return linear(g, g.gelu_tanh(linear(g, x, w.under("net.0.proj"))), w.under("net.2"))


def two_layers(g: Graph, x: Value, w: Weights, slot: int) -> Value:
    return by_slot(g, g.relu(by_slot(g, x, w.under("layer1"), slot)), w.under("layer2"), slot)


def by_slot(g: Graph, x: Value, w: Weights, slot: int) -> Value:
    """A layer whose weights are one embodiment's: stored [slot, in, out]."""
    matrix: Tensor = w["W"].row(slot)
    return g.linear(x, matrix.transposed(), w["b"].row(slot))


def halves(g: Graph, row: Value) -> tuple[Value, Value]:  # [1, 2 W] -> [1, W] twice
    width = row.shape[1]
    assert isinstance(width, int)
    return g.slice(row, 1, 0, width // 2), g.slice(row, 1, width // 2, width)
