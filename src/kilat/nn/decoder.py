"""The pre-norm decoder that Llama, Mistral and Qwen share: embedding, layers of attention and gated MLP, final norm, output head."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kilat.nn.attention import Attention, AttentionConfig
from kilat.nn.build import Build
from kilat.nn.embedding import Embedding, untied_head
from kilat.nn.mlp import GatedMlp
from kilat.nn.rotary import Rope, cos_sin_table
from kilat.nn.wanted import pays, wanted_rows
from kilat.ops.batch import StepBatch
from kilat.ops.layers import LayerWeights
from kilat.ops.rope_write import KvScale


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that decides the math of a decoder. ``attention`` has one entry per layer."""

    vocab_size: int
    hidden: int
    inner: int
    norm_eps: float
    rope: Rope
    attention: Sequence[AttentionConfig]
    mlp_bias: bool
    tied: bool
    max_positions: int


class DecoderLayer:
    """One layer under checkpoint prefix ``name``; works on (x, residual) so that every add is fused with the norm after it."""

    def __init__(self, build: Build, name: str, config: DecoderConfig, attention: AttentionConfig) -> None:
        self.attention = Attention(build, f"{name}.self_attn", attention)
        self.mlp = GatedMlp(build, f"{name}.mlp", config.hidden, config.inner, bias=config.mlp_bias)
        self.norm_in = build.take(f"{name}.input_layernorm.weight", (config.hidden,))
        self.norm_mid = build.take(f"{name}.post_attention_layernorm.weight", (config.hidden,))
        self.eps = config.norm_eps
        self.feed_attention = build.kernels.feeding(self.attention.qkv)
        self.feed_mlp = build.kernels.feeding(self.mlp.gate_up)

    def weights(self) -> LayerWeights:
        """The layer as an op that runs all layers takes it."""
        a, m = self.attention, self.mlp
        return LayerWeights(
            self.norm_in,
            a.qkv,
            a.heads,
            a.norm,
            a.window,
            a.out.weight,
            self.norm_mid,
            m.gate_up,
            m.down.weight,
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos_sin: Tensor, kv: Tensor, batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, hidden] -> the same pair; the layer's input is x + residual (residual None: x alone)."""
        x, residual = self._enter(x, residual)
        return self._leave(self.attention(x, cos_sin, kv, batch), residual)

    def wanted(
        self, x: Tensor, residual: Tensor | None, cos_sin: Tensor, kv: Tensor, batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """As a call, but the pair is that of the tokens at ``batch.logits_at`` [S, hidden]: of the others only K and V are computed.
        Needs ``attention.parts``."""
        x, residual = self._enter(x, residual)
        self.attention.write(x, cos_sin, kv, batch)
        # TRAP: our kernels may read a StepBatch and older tokens' K and V before the kernels in front of them are done. The rows are picked
        # by ordinary launches, which let nothing pass: they have to lie behind the write and, the last one, behind the new batch.
        rows = wanted_rows(batch)
        residual = residual[batch.logits_at]
        if len(residual) == 0:
            return residual, residual
        x = self.feed_attention.rms_norm(residual, self.norm_in, self.eps)
        return self._leave(self.attention.read(x, cos_sin, kv, rows), residual)

    def _enter(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.feed_attention.rms_norm(x, self.norm_in, self.eps), x
        return self.feed_attention.add_rms_norm(x, residual, self.norm_in, self.eps)

    def _leave(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.feed_mlp.add_rms_norm(x, residual, self.norm_mid, self.eps)
        return self.mlp(x), residual


class Decoder:
    """A whole model. ``kv`` is the pool [pages, layers, 2, page_tokens, Hkv, D]; its pages of the step's rows are written."""

    def __init__(self, build: Build, config: DecoderConfig, max_model_len: int) -> None:
        c = self.config = config
        table = (c.vocab_size, c.hidden)
        self.embedding = Embedding(build, "model.embed_tokens.weight", table)
        self.layers = [DecoderLayer(build, f"model.layers.{i}", c, a) for i, a in enumerate(c.attention)]
        self.norm = build.take("model.norm.weight", (c.hidden,))
        self.head = self.embedding.as_head(build) if c.tied else untied_head(build, "lm_head.weight", table)
        self.cos_sin = cos_sin_table(c.rope, max_model_len, build.device)
        self.kernels = build.kernels
        bind = build.kernels.bind_layers if build.mesh.tp_size == 1 else None
        self.all_layers = bind([layer.weights() for layer in self.layers], c.norm_eps) if bind else None

    def scale_kv(self, scales: Sequence[KvScale]) -> None:
        """From now on the pool is e4m3 with these scales, one a layer."""
        for layer, scale in zip(self.layers, scales, strict=True):
            layer.attention.kv_scale = scale

    def one_by_one(self, x: Tensor, batch: StepBatch, kv: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] through the layers, op after op: (x, residual) of the tokens at ``batch.logits_at``, whose sum leaves the last one."""
        residual = None
        *layers, last = self.layers
        for i, layer in enumerate(layers):
            x, residual = layer(x, residual, self.cos_sin, kv[:, i], batch)
        if last.attention.parts is not None and pays(batch):
            return last.wanted(x, residual, self.cos_sin, kv[:, len(layers)], batch)
        return _at_logits(batch, *last(x, residual, self.cos_sin, kv[:, len(layers)], batch))

    def __call__(self, batch: StepBatch, kv: Tensor) -> Tensor:
        """Logits [S, vocab] of the tokens at ``batch.logits_at``, in the model's dtype."""
        x = self.embedding(batch.token_ids)
        if self.all_layers is not None:
            x, residual = self.all_layers(x, self.cos_sin, kv, batch)
        else:
            x, residual = self.one_by_one(x, batch, kv)
        x, _ = self.kernels.add_rms_norm(x, residual, self.norm, self.config.norm_eps)
        return self.kernels.linear(x, self.head)


def _at_logits(batch: StepBatch, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the tokens whose logits are wanted."""
    at = batch.logits_at
    return (x, residual) if at is None else (x[at], residual[at])
