"""pi0.5 as four graphs. B rows, V views, P patches of a view, S prefix tokens, H actions, W wide, D a head's width, M adaRMS sites."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vla_eval.engines.blocks import Rope, gated_mlp, heads, joined, layer_norm, linear, patches, rope_from_table, rotate, split_linear
from vla_eval.engines.graph import Dim, Graph, Value
from vla_eval.engines.weights import Tensor, Weights

from .configuration import EXPERT, PREFIX, PROJECTOR, VISION, Geometry, Tower, Vision, site_names

SPLIT = {"in": 4, "wide": 2, "out": 8}  # parts of the sums of the expert's products: the ten rows of one robot leave most of a GPU idle


def visual(g: Graph, a: Geometry, w: Weights, views: Dim) -> None:
    """Pictures -> tokens of the prefix tower's width, P for each view. They are not scaled: text tokens alone are."""
    v, tower = a.vision, w.under(VISION)
    x = patches(g, g.input("pixel_values", g.dtype, (views, 3, v.image, v.image)), v.patch)  # [V, P, 3 · patch²]
    kernel = tower["embeddings.patch_embedding.weight"].reshaped((v.hidden, 3 * v.patch**2))
    x = g.linear(x, kernel, tower["embeddings.patch_embedding.bias"])
    x = g.label(g.add(x, g.weight(tower["embeddings.position_embedding.weight"])), "vision.embeddings")
    for i in range(v.layers):
        x = vision_layer(g, x, tower.under("encoder.layers").under(i), v, f"vision.layer_{i:02d}")
    x = g.label(layer_norm(g, x, tower.under("post_layernorm"), eps=v.layer_norm_eps), "vision.post_layernorm")
    g.output(linear(g, x, w.under(PROJECTOR)), "image_features")


def vision_layer(g: Graph, x: Value, w: Weights, v: Vision, name: str) -> Value:  # [V, P, W]
    y, attention = layer_norm(g, x, w.under("layer_norm1"), eps=v.layer_norm_eps), w.under("self_attn")
    q, k, value = (heads(g, linear(g, y, attention.under(part)), v.head_dim) for part in ("q_proj", "k_proj", "v_proj"))
    seen = joined(g, g.attention(q, k, value, scale=v.head_dim**-0.5))
    x = g.add(x, linear(g, seen, attention.under("out_proj")))
    y = layer_norm(g, x, w.under("layer_norm2"), eps=v.layer_norm_eps)
    return g.label(g.add(x, linear(g, g.gelu_tanh(linear(g, y, w.under("mlp.fc1"))), w.under("mlp.fc2"))), name)


def prefix(g: Graph, a: Geometry, w: Weights, batch: Dim, tokens: Dim) -> None:
    """Picture and text tokens, all of them valid -> every layer's keys, after rotary, and values. Every token sees every token."""
    t, w = a.prefix, w.under(PREFIX)
    x = g.input("inputs_embeds", g.dtype, (batch, tokens, t.width))
    rope = rope_input(g, batch, tokens, t)
    for i in range(t.layers):
        layer, name = w.under("layers").under(i), f"prefix.layer_{i:02d}"
        y, attention = gemma_norm(g, x, layer.under("input_layernorm"), a), layer.under("self_attn")
        k = rotate(g, heads(g, linear(g, y, attention.under("k_proj")), t.head_dim), rope)
        v = heads(g, linear(g, y, attention.under("v_proj")), t.head_dim)
        for letter, value in (("k", k), ("v", v)):
            g.output(g.transpose(value, (0, 2, 1, 3)), f"prefix_{letter}_layer{i:02d}")  # [B, S, 1, D]
        if i == t.layers - 1:
            return  # nobody reads what the last layer would go on to compute
        q = rotate(g, heads(g, linear(g, y, attention.under("q_proj")), t.head_dim), rope)
        seen = joined(g, g.attention(q, k, v, scale=t.head_dim**-0.5))
        x = g.add(x, linear(g, seen, attention.under("o_proj")))
        y = gemma_norm(g, x, layer.under("post_attention_layernorm"), a)
        x = g.label(g.add(x, gated_mlp(g, y, layer.under("mlp"), g.gelu_tanh)), name)


def cond(g: Graph, a: Geometry, w: Weights, times: Dim) -> None:
    """Times of the flow -> scale, shift and gate of every adaRMS site [times, M, 3 W]: all that depends on the time alone."""
    g.output(modulation(g, a, w, g.input("timesteps", "float32", (times,))), "adarms_modulation")


def action(g: Graph, a: Geometry, w: Weights, batch: Dim, tokens: Dim, horizon: int, width: int, *, hoisted: bool) -> None:
    """One denoise step: the velocity at noisy actions that see the whole prefix and one another. x, t and both projections are float32."""
    e = a.expert
    x = g.input("noise_trajectory", "float32", (batch, horizon, width))
    if hoisted:
        modulated = g.input("adarms_modulation", "float32", (batch, a.sites, 3 * e.width))
    else:
        modulated = modulation(g, a, w, g.input("timestep", "float32", (batch,)))
    rope = rope_input(g, batch, horizon, e)
    seen = {
        (letter, i): g.input(f"prefix_{letter}_layer{i:02d}", g.dtype, (batch, tokens, e.kv_heads, e.head_dim))
        for i in range(e.layers)
        for letter in "kv"
    }
    x = g.cast(g.label(linear(g, x, w.under("action_in_proj")), "step.action_tokens"), g.dtype)
    parts = SPLIT if batch == 1 else dict.fromkeys(SPLIT, 1)
    for i in range(e.layers):
        x = expert_layer(g, x, w.under(EXPERT).under("layers").under(i), a, i, modulated, rope, seen["k", i], seen["v", i], parts)
    scale, shift, _ = site(g, modulated, a.sites - 1, e)
    x = g.label(ada_norm(g, x, scale, shift, a), "step.final_norm")  # float32
    g.output(linear(g, x, w.under("action_out_proj")), "action_pred")


def expert_layer(
    g: Graph,
    x: Value,
    w: Weights,
    a: Geometry,
    i: int,
    modulated: Value,
    rope: Rope,
    prefix_k: Value,
    prefix_v: Value,
    parts: Mapping[str, int],
) -> Value:  # [B, H, W]
    e, attention = a.expert, w.under("self_attn")
    scale, shift, gate = site(g, modulated, 2 * i, e)
    y = g.cast(ada_norm(g, x, scale, shift, a), g.dtype)
    q, k, v = (heads(g, split_linear(g, y, attention.under(f"{part}_proj"), parts["in"]), e.head_dim) for part in "qkv")
    q, k = rotate(g, q, rope), rotate(g, k, rope)
    k, v = (g.concat([g.transpose(theirs, (0, 2, 1, 3)), own], 2) for theirs, own in ((prefix_k, k), (prefix_v, v)))
    seen = joined(g, g.attention(q, k, v, scale=e.head_dim**-0.5))
    x = gated(g, x, split_linear(g, seen, attention.under("o_proj"), parts["out"]), gate)
    scale, shift, gate = site(g, modulated, 2 * i + 1, e)
    y, mlp = g.cast(ada_norm(g, x, scale, shift, a), g.dtype), w.under("mlp")
    wide, open_ = (split_linear(g, y, mlp.under(f"{part}_proj"), parts["wide"]) for part in ("up", "gate"))
    y = split_linear(g, g.mul(g.gelu_tanh(open_), wide), mlp.under("down_proj"), parts["out"])
    return g.label(gated(g, x, y, gate), f"step.layer_{i:02d}")


def modulation(g: Graph, a: Geometry, w: Weights, times: Value) -> Value:  # [B] -> [B, M, 3 W], all in float32
    e = a.expert
    x = g.label(time_embedding(g, times, e.width, a.time_min_period, a.time_max_period), "step.time_embedding")
    x = g.silu(linear(g, x, w.under("time_mlp_in")))
    x = g.label(g.silu(linear(g, x, w.under("time_mlp_out"))), "step.adarms_cond")  # a silu behind both
    rows = [g.reshape(linear(g, x, w.under(EXPERT).under(f"{name}.dense")), (0, 1, 3 * e.width)) for name in site_names(a)]
    return g.concat(rows, 1)


def time_embedding(g: Graph, times: Value, width: int, least: float, most: float) -> Value:
    """[B] -> [B, width]: sines, then cosines of 2πt / period, the periods in geometric order from `least` to `most`.

    A phase reaches 250 turns, of which float32 would keep four digits. So times and frequencies are cut into a coarse and a fine part:
    the product of the coarse ones is exact, its whole turns are dropped, and what is left is small.
    """
    turns = 1.0 / (least * (most / least) ** np.linspace(0.0, 1.0, width // 2))  # a second, so to speak
    coarse = (turns.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)  # 12 bits
    fine = (turns - coarse).astype(np.float32)
    t = g.reshape(times, (-1, 1))
    t_coarse = g.cast(g.cast(t, "float16"), "float32")  # 11 bits
    t_fine = g.sub(t, t_coarse)
    exact = g.mul(t_coarse, g.constant(coarse[None]))
    part = g.sub(exact, g.cast(g.cast(exact, "int32"), "float32"))
    rest = g.add(g.mul(t_coarse, g.constant(fine[None])), g.mul(t_fine, g.constant((coarse + fine)[None])))
    phase = g.mul(g.add(part, rest), 2 * math.pi)
    return g.concat([g.sin(phase), g.cos(phase)], 1)


def rope_input(g: Graph, batch: Dim, tokens: Dim, t: Tower) -> Rope:
    table = g.input("rope_rotary_cos_sin", "float32", (batch, tokens, t.head_dim))  # cosines | sines, of the positions that are there
    rows = g.input("attention_pos_id", "int32", (batch, tokens))  # of the table with its rows laid end to end
    return rope_from_table(g, g.reshape(table, (-1, t.head_dim)), rows)


def gemma_norm(g: Graph, x: Value, w: Weights, a: Geometry) -> Value:
    """RMSNorm whose gain is 1 + weight."""
    return g.rms_norm(x, gain(w["weight"]), eps=a.rms_norm_eps)


def gain(weight: Tensor) -> Tensor:
    return weight.changed("plus 1", lambda numbers: 1 + numbers.astype(np.float32))


def site(g: Graph, modulated: Value, i: int, e: Tower) -> list[Value]:
    """Scale, shift and gate of one adaRMS site, [B, 1, W] each."""
    row = g.slice(modulated, 1, i, i + 1)
    return [g.slice(row, 2, k * e.width, (k + 1) * e.width) for k in range(3)]


def ada_norm(g: Graph, x: Value, scale: Value, shift: Value, a: Geometry) -> Value:
    """RMSNorm without a weight, then * (1 + scale) + shift; float32."""
    return g.add(g.mul(g.rms_norm(g.cast(x, "float32"), eps=a.rms_norm_eps), g.add(scale, 1.0)), shift)


def gated(g: Graph, x: Value, branch: Value, gate: Value) -> Value:
    """x + branch * gate, summed in float32."""
    return g.cast(g.add(g.cast(x, "float32"), g.mul(g.cast(branch, "float32"), gate)), x.dtype)
