"""Random models for the CUDA backend: described for it, and computed by torch with roundings at the same places."""

import ctypes as c
import dataclasses

import torch

from tests.native import cuda_table as table


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model. ``shared``: all layers have the first one's weights, so that a large model takes little of the host."""

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    format: str = "bf16"
    tied: bool = True
    qkv_bias: bool = False
    all_biases: bool = False
    head_norms: bool = False
    window: int = 0
    rotary: int = 0
    shared: bool = False
    wide: bool = False


class RandomModel:
    """Weights on host and device; :meth:`reference` is what the backend should compute, and leaves keys and values in ``kept``."""

    def __init__(self, config: Config, device: str = "cuda", seed: int = 0) -> None:
        self.config, self.device = config, device
        self.random = torch.Generator(device).manual_seed(seed)
        n = config
        kv, q = n.kv_heads * n.head_dim, n.q_heads * n.head_dim
        self.shapes = {"q": (q, n.hidden), "k": (kv, n.hidden), "v": (kv, n.hidden), "o": (n.hidden, q)}
        self.shapes |= {
            "gate": (n.inner, n.hidden),
            "up": (n.inner, n.hidden),
            "down": (n.hidden, n.inner),
        }
        self.embedding = table.plain(self._normal((n.vocab, n.hidden), 1.0))
        self.head = self.embedding if n.tied else self._matrix((n.vocab, n.hidden))
        self.norm = table.plain(1 + self._normal((n.hidden,), 0.1))
        self.layers = [self._layer()]
        while len(self.layers) < n.layers:
            self.layers.append(self.layers[0] if n.shared else self._layer())
        dim = self.config.rotary or n.head_dim
        self.frequencies = 1.0 / 500000.0 ** (torch.arange(0, dim, 2).float() / dim)

    def _normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.device) * std

    def _matrix(self, shape: tuple[int, int]) -> table.Weight:
        return table.PACKERS[self.config.format](self._normal(shape, shape[1] ** -0.5))

    def _layer(self) -> dict[str, table.Weight]:
        n = self.config
        w = {name: self._matrix(shape) for name, shape in self.shapes.items()}
        for name in ("norm_in", "norm_mid"):
            w[name] = table.plain(1 + self._normal((n.hidden,), 0.1))
        biased = list(self.shapes) if n.all_biases else ["q", "k", "v"] if n.qkv_bias else []
        for name in biased:
            w[name + "_bias"] = table.plain(self._normal((self.shapes[name][0],), 0.3))
        if n.head_norms:
            for name in table.HEAD_NORMS:
                w[name] = table.plain(1 + self._normal((n.head_dim,), 0.1))
        return w

    def described(self) -> table.Model:
        """The description; keep this object while it is used."""
        n = self.config
        self._layers = (table.Layer * n.layers)()
        for out, weights in zip(self._layers, self.layers):
            for name, weight in weights.items():
                setattr(out, name, weight.described())
            out.window = n.window
        m = table.Model(n.vocab, n.hidden, n.inner, n.layers, n.q_heads, n.kv_heads, n.head_dim)
        m.rotary, m.max_context = len(self.frequencies) * 2, 131072
        m.norm_eps = m.qk_norm_eps = 1e-5
        m.inverse_frequencies = c.cast(self.frequencies.data_ptr(), c.POINTER(c.c_float))
        m.rope_factor, m.dtype, m.tied = 1.0, table.DTYPE_BF16, n.tied
        m.weights = table.WIDE if n.wide else table.STORED
        m.embedding, m.norm = self.embedding.described(), self.norm.described()
        if not n.tied:
            m.head = self.head.described()
        m.layers = self._layers
        return m

    def reference(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, vocab] fp32, and what entered each layer and left the last [layers + 1, T, hidden]."""
        n = self.config
        x = self.embedding.values[torch.tensor(ids, device=self.device)]
        position = torch.arange(len(ids), device=self.device)
        angle = position.float()[:, None] * self.frequencies.to(self.device)
        turn = angle.double().cos().float(), angle.double().sin().float()
        hidden = position[None, :] > position[:, None]
        if n.window:
            hidden |= position[None, :] <= position[:, None] - n.window
        seen = [x]
        self.kept: list[torch.Tensor] = []
        for w in self.layers:
            x = rounded(x + self._attention(normed(x, w["norm_in"].values), w, turn, hidden))
            x = rounded(x + self._mlp(normed(x, w["norm_mid"].values), w))
            seen.append(x)
        return rounded(normed(x, self.norm.values) @ self.head.values.T), torch.stack(seen)

    def state(self, n: int) -> torch.Tensor:
        """What a session would save after n of the ids of the last :meth:`reference`, with logits of zero."""
        rows = torch.stack(self.kept)[..., :n, :].bfloat16().flatten().cpu()
        return torch.cat((rows.view(torch.uint8), torch.zeros(self.config.vocab * 4, dtype=torch.uint8)))

    def _linear(self, x: torch.Tensor, w: dict[str, table.Weight], name: str) -> torch.Tensor:
        matrix = w[name].values.bfloat16().float() if self.config.wide else w[name].values
        bias = w[name + "_bias"].values if name + "_bias" in w else 0.0
        return rounded(x @ matrix.T + bias)

    def _attention(self, x, w, turn, hidden) -> torch.Tensor:
        n = self.config
        q, k, v = (self._linear(x, w, s).view(len(x), -1, n.head_dim).transpose(0, 1) for s in "qkv")
        if n.head_norms:
            q, k = normed(q, w["q_norm"].values), normed(k, w["k_norm"].values)
        q, k = rotated(q, *turn), rotated(k, *turn)
        self.kept.append(torch.stack((k, v), 1))
        k, v = (t.repeat_interleave(n.q_heads // n.kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) * n.head_dim**-0.5).masked_fill(hidden, -torch.inf)
        out = rounded(scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        return self._linear(out, w, "o")

    def _mlp(self, x: torch.Tensor, w: dict[str, table.Weight]) -> torch.Tensor:
        gate = rounded(torch.nn.functional.silu(self._linear(x, w, "gate")))
        return self._linear(rounded(gate * self._linear(x, w, "up")), w, "down")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Once through bf16."""
    return x.bfloat16().float()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rounded(rounded(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) * weight)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return rounded(torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1))


class Session:
    """A model and a session of the backend; errors are exceptions."""

    def __init__(self, lib: c.CDLL, model: RandomModel, context: int, flags: int = 0) -> None:
        self.lib, self.vocab, self.config = lib, model.config.vocab, model.config
        self.table, self.failure = lib.kilat_cuda_backend().contents, table.Failure()
        self.model, self.session = c.c_void_p(), c.c_void_p()
        description = model.described()
        self._check(
            self.table.model_build(c.byref(description), None, c.byref(self.model), c.byref(self.failure))
        )
        self._check(
            self.table.session_create(
                self.model, context, flags, c.byref(self.session), c.byref(self.failure)
            )
        )

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"status {status}: {self.failure.text.decode()}")

    def close(self) -> None:
        self.table.session_free(self.session)
        self.table.model_free(self.model)

    def forward(
        self, ids: list[int], first: int, draw: table.Draw | None = None, after: table.Draw | None = None
    ) -> int:
        numbers, out = (c.c_int32 * len(ids))(*ids), c.c_int32(-1)
        self._check(
            self.table.forward(
                self.session, numbers, len(ids), first, draw, after, c.byref(out), c.byref(self.failure)
            )
        )
        return out.value

    def sample(self, draw: table.Draw) -> int:
        out = c.c_int32(-1)
        self._check(self.table.sample(self.session, c.byref(draw), c.byref(out), c.byref(self.failure)))
        return out.value

    def logits(self) -> torch.Tensor:
        out = torch.empty(self.vocab)
        self._check(self.table.logits_read(self.session, out.data_ptr(), c.byref(self.failure)))
        return out

    def layers(self) -> torch.Tensor:
        out = torch.empty(self.config.layers + 1, self.config.hidden)
        self._check(self.table.layers_read(self.session, out.data_ptr(), c.byref(self.failure)))
        return out

    def state(self, n: int) -> torch.Tensor:
        out = torch.empty(self.table.state_bytes(self.session, n), dtype=torch.uint8)
        self._check(self.table.state_read(self.session, n, out.data_ptr(), c.byref(self.failure)))
        return out

    def restore(self, n: int, state: torch.Tensor) -> None:
        self._check(self.table.state_write(self.session, n, state.data_ptr(), c.byref(self.failure)))

    def memory(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for call, handle in (
            (self.table.model_memory, self.model),
            (self.table.session_memory, self.session),
        ):
            owners = (table.Memory * 16)()
            for owner in owners[: call(handle, owners, 16)]:
                name = owner.owner.decode()
                out[name] = out.get(name, 0) + owner.device_bytes
        return out


def greedy() -> table.Draw:
    return table.Draw(0.0, 1.0, 0.0, 0.5, 0)
