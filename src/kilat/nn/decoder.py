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
    """One layer under checkpoint prefix ``name``. It takes x [T, hidden] with its first norm done and the residual [T, hidden], and gives what
    ``mlp.down`` takes and the residual: every product is fused with the add and norm after it, those of the next layer too."""

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
        self, x: Tensor, residual: Tensor, cos_sin: Tensor, kv: Tensor, batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        return self._leave(self.attention(x, cos_sin, kv, batch), residual)

    def wanted(
        self, x: Tensor, residual: Tensor, cos_sin: Tensor, kv: Tensor, batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """As a call, but the pair is that of the tokens at ``batch.logits_at``: of the others only K and V are computed. Needs
        ``attention.parts`` and a token whose logits are wanted."""
        self.attention.write(x, cos_sin, kv, batch)
        # TRAP: our kernels may read a StepBatch and older tokens' K and V before the kernels in front of them are done. The rows are picked
        # by ordinary launches, which let nothing pass: they have to lie behind the write and, the last one, behind the new batch.
        rows = wanted_rows(batch)
        residual = residual[batch.logits_at]
        return self._leave(self.attention.read(self.enter(residual), cos_sin, kv, rows), residual)

    def enter(self, residual: Tensor) -> Tensor:
        """The first norm alone."""
        return self.feed_attention.rms_norm(residual, self.norm_in, self.eps)

    def follow(self, before: "DecoderLayer", x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What ``before`` gave, as this layer takes it."""
        return before.mlp.down.add_rms_norm(x, residual, self.norm_in, self.eps, self.feed_attention)

    def _leave(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.attention.out.add_rms_norm(x, residual, self.norm_mid, self.eps, self.feed_mlp)
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

    def one_by_one(self, residual: Tensor, batch: StepBatch, kv: Tensor) -> Tensor:
        """The embeddings [T, hidden] through the layers, op after op: the last norm of the tokens at ``batch.logits_at``."""
        layers, eps = self.layers, self.config.norm_eps
        x, last = layers[0].enter(residual), layers[-1]
        for i, layer in enumerate(layers[:-1]):
            x, residual = layer(x, residual, self.cos_sin, kv[:, i], batch)
            x, residual = layers[i + 1].follow(layer, x, residual)
        here, at = kv[:, len(layers) - 1], batch.logits_at
        if last.attention.parts is not None and pays(batch):
            if at is not None and len(at) == 0:
                last.attention.write(x, self.cos_sin, here, batch)
                return residual[at]
            x, residual = last.wanted(x, residual, self.cos_sin, here, batch)
        else:
            x, residual = last(x, residual, self.cos_sin, here, batch)
            if at is not None:
                return self.kernels.add_rms_norm(last.mlp.down(x)[at], residual[at], self.norm, eps)[0]
        return last.mlp.down.add_rms_norm(x, residual, self.norm, eps, self.kernels)[0]

    def __call__(self, batch: StepBatch, kv: Tensor) -> Tensor:
        """Logits [S, vocab] of the tokens at ``batch.logits_at``, in the model's dtype."""
        x = self.embedding(batch.token_ids)
        if self.all_layers is not None:
            x, residual = self.all_layers(x, self.cos_sin, kv, batch)
            x, _ = self.kernels.add_rms_norm(x, residual, self.norm, self.config.norm_eps)
        else:
            x = self.one_by_one(x, batch, kv)
        return self.kernels.linear(x, self.head)
