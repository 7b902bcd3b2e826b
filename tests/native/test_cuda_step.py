"""A pass of the CUDA backend against torch with the same roundings; one token at a time, in prompts, after a restore.

The same tests run on an emulated device (native/tests/emulated), with smaller models: its threads take turns in a random order.
"""

import ctypes as c
import dataclasses
import shutil

import pytest
import torch

from kilat.ops.sample import Filter, sample_row, uniform
from tests.native import cuda_table as table
from tests.native.cuda_models import Config, RandomModel, Session, greedy

LLAMA = Config(3, 256, 704, 8, 2, 64, 1003)
CONFIGS = {
    "llama": LLAMA,
    "llama-untied": Config(2, 512, 1000, 4, 4, 128, 515, tied=False),
    "qwen2": Config(2, 896, 4864, 14, 2, 64, 2048, qkv_bias=True),
    "qwen3": Config(2, 512, 1024, 16, 4, 128, 600, head_norms=True),
    "all-biases": Config(2, 256, 512, 4, 4, 32, 500, all_biases=True),
    "window-partial-rotation": Config(2, 256, 512, 10, 2, 96, 500, window=50, rotary=48),
    "large-heads": Config(1, 768, 512, 4, 1, 256, 500),
    "twelve-heads-of-one": Config(2, 256, 512, 12, 1, 64, 500),
    "fp8": Config(2, 512, 1152, 8, 2, 64, 500, format="fp8", tied=False),
    "fp8-wide": Config(2, 512, 1152, 8, 2, 64, 500, format="fp8", wide=True),
    "q4_0": Config(2, 512, 1152, 8, 2, 64, 500, format="q4_0", tied=False),
    "q4_1": Config(2, 576, 1536, 9, 3, 64, 500, format="q4_1", tied=False),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """Where a test runs: ``name`` is torch's device for the reference."""

    name: str
    lib: c.CDLL

    def model(self, name: str) -> RandomModel:
        """A model that is not too large for this device."""
        config = CONFIGS[name]
        if self.name == "cpu":
            hidden = 64 if config.hidden == 576 else 128
            narrow = {"hidden": hidden, "inner": min(config.inner, 192), "vocab": min(config.vocab, 203)}
            config = dataclasses.replace(config, **narrow, layers=min(config.layers, 2))
        return RandomModel(config, self.name)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.cpu, id="emulated"),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def device(request) -> Device:
    if request.param == "cpu" and not shutil.which("g++"):
        pytest.skip("no g++")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Device(request.param, table.load_library(table.build_library(request.param == "cpu")))


@pytest.fixture
def opened(device):
    """Opens sessions and closes them."""
    sessions = []

    def create(model: RandomModel, context: int = 512, flags: int = table.KEEP_LAYERS) -> Session:
        sessions.append(Session(device.lib, model, context, flags))
        return sessions[-1]

    yield create
    for session in sessions:
        session.close()


def tokens(n: int, vocab: int) -> list[int]:
    return [(i * 7919 + 13) % vocab for i in range(n)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b.cpu()).norm() / b.norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_layers_are_those_of_torch(device, opened, name):
    model = device.model(name)
    session = opened(model)
    cuts = (5, 1, 1, 64, 1, 130, 1) if device.name == "cuda" else (5, 1, 1, 30, 1)
    ids = tokens(sum(cuts), model.config.vocab)
    logits, layers = model.reference(ids)
    done = 0
    for n in cuts:
        session.forward(ids[done : done + n], done)
        done += n
        assert distance(session.layers(), layers[:, done - 1]) < 1e-2, f"layers at {done - 1}"
        assert distance(session.logits(), logits[done - 1]) < 1.5e-2, f"logits at {done - 1}"


# sizes of heads of which a warp has four, two and one group of keys at once
@pytest.mark.parametrize("name", ["llama", "llama-untied", "large-heads"])
def test_a_context_that_takes_several_rounds_of_keys_is_attended_to_as_in_torch(device, opened, name):
    model = device.model(name)
    for n in (8500, 3000, 400) if device.name == "cuda" else (1300, 500, 120):
        ids = tokens(n + 1, model.config.vocab)
        logits, layers = model.reference(ids)
        session = opened(model, context=n + 1)
        session.restore(n, model.state(n))
        session.forward(ids[n:], n)
        assert distance(session.layers(), layers[:, n]) < 1e-2
        assert distance(session.logits(), logits[n]) < 1.5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_layers_of_a_large_model_are_those_of_torch(device, opened):
    model = RandomModel(Config(2, 4096, 14336, 32, 8, 128, 4096, tied=False))
    session = opened(model)
    ids = tokens(90, 4096)
    logits, layers = model.reference(ids)
    for first, n in ((0, 88), (88, 1), (89, 1)):
        session.forward(ids[first : first + n], first)
        assert distance(session.layers(), layers[:, first + n - 1]) < 1e-2
        assert distance(session.logits(), logits[first + n - 1]) < 1.5e-2


@pytest.mark.parametrize("name", ["llama", "window-partial-rotation", "q4_1"])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(device, opened, name):
    model = device.model(name)
    # on a device two passes of many tokens, and several blocks of them
    ids, cuts = (
        (tokens(600, model.config.vocab), (1, 70, 600))
        if device.name == "cuda"
        else (tokens(35, 203), (1, 7, 35))
    )
    seen = []
    for cut in cuts:
        session = opened(model, context=600)
        for first in range(0, len(ids), cut):
            session.forward(ids[first : first + cut], first)
        seen.append((session.logits(), session.state(len(ids)), session.layers()))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


# the spans that attention cuts a context into grow at the third of the five tokens
@pytest.mark.parametrize(
    "name", ["llama", "llama-untied", "large-heads", "twelve-heads-of-one", "window-partial-rotation"]
)
def test_a_prompt_after_a_long_context_gives_the_bits_of_single_tokens(device, opened, name):
    model = device.model(name)
    n = 1022 if device.name == "cuda" else 126
    ids = tokens(n + 5, model.config.vocab)
    model.reference(ids)
    together, apart = opened(model, context=n + 5), opened(model, context=n + 5)
    together.restore(n, model.state(n)), apart.restore(n, model.state(n))
    together.forward(ids[n:], n)
    for i in range(n, n + 5):
        apart.forward(ids[i : i + 1], i)
    assert torch.equal(together.logits(), apart.logits())
    assert torch.equal(together.state(n + 5), apart.state(n + 5))


# of which a block takes 256 rows of weights, not 128, and several blocks share columns, on the device and on the emulated one
@pytest.mark.parametrize("kind", table.PACKERS)
def test_large_products_of_a_prompt_give_the_bits_of_single_tokens(device, opened, kind):
    sizes = (1024, 16384) if device.name == "cuda" else (128, 640)
    model = RandomModel(Config(1, *sizes, 2, 1, 64, 203, format=kind), device.name)
    together, apart = opened(model), opened(model)
    ids = tokens(80 if device.name == "cuda" else 2, 203)
    together.forward(ids, 0)
    for i, token in enumerate(ids):
        apart.forward([token], i)
    assert torch.equal(together.layers(), apart.layers())
    assert torch.equal(together.state(len(ids)), apart.state(len(ids)))


def test_a_step_gives_the_same_bits_again(device, opened):
    model = device.model("qwen2")
    ids = tokens(300 if device.name == "cuda" else 40, model.config.vocab)
    session = opened(model)
    session.forward(ids, 0)
    first = session.logits()
    for _ in range(20 if device.name == "cuda" else 5):
        session.forward(ids[-1:], len(ids) - 1)
        assert torch.equal(session.logits(), first)


def test_a_restored_session_goes_on_as_the_first_would(device, opened):
    model = device.model("llama")
    a, b = opened(model), opened(model, context=300)
    ids = tokens(41, model.config.vocab)
    a.forward(ids[:40], 0)
    b.restore(40, a.state(40))
    assert torch.equal(a.logits(), b.logits())
    a.forward(ids[40:], 40), b.forward(ids[40:], 40)
    assert torch.equal(a.logits(), b.logits())


def test_greedy_takes_the_lowest_of_the_largest(device, opened):
    model = device.model("llama")
    session = opened(model)
    for i, token in enumerate(tokens(12, model.config.vocab)):
        drawn = session.forward([token], i, c.byref(greedy()))
        assert drawn == int(session.logits().argmax())


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (0.9, 50, 0.9, 0.02),
    (1.0, 1, 1.0, 0.0),
]


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_are_those_of_the_reference(device, opened, filters):
    temperature, top_k, top_p, min_p = filters
    session = opened(device.model("qwen2"))
    session.forward([5, 6, 7], 0)
    logits = session.logits()
    wanted, got = [], []
    for position in range(200 if device.name == "cuda" else 20):
        draw = table.Draw(temperature, top_p, min_p, uniform(3, position), top_k)
        got.append(session.sample(draw))
        wanted.append(sample_row(logits, Filter(temperature, top_k, top_p, min_p, 3, position)))
    # a uniform number may fall between the two sums of exp, which differ in their last bits
    assert sum(a != b for a, b in zip(got, wanted)) <= 1


def test_a_draw_of_a_step_is_the_draw_of_its_logits(device, opened):
    model = device.model("llama")
    session = opened(model)
    for i, token in enumerate(tokens(10, model.config.vocab)):
        draw = table.Draw(1.1, 0.95, 0.0, uniform(9, i), 40)
        assert session.forward([token], i, c.byref(draw)) == session.sample(draw)


@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_steps_that_are_begun_early_change_no_bit(device, opened, temperature):
    model = device.model("llama")
    plain, early = opened(model, flags=0), opened(model, flags=0)
    ids, n = tokens(5, model.config.vocab), 5

    def draw(position: int) -> table.Draw:
        return table.Draw(temperature, 0.95, 0.0, uniform(9, position), 40)

    for i in range(40 if device.name == "cuda" else 12):
        own, following = draw(n), c.byref(draw(n + 1))
        drawn = plain.forward(ids, n - len(ids), c.byref(own))
        assert early.forward(ids, n - len(ids), c.byref(own), following) == drawn
        if i % 3 == 1:
            assert early.sample(draw(n + 7)) == plain.sample(draw(n + 7))
            assert torch.equal(early.logits(), plain.logits())
        if i % 5 == 2:
            assert torch.equal(early.state(n), plain.state(n))
        if i % 5 == 3:
            early.restore(n, plain.state(n))
        # what was begun is of use twice, then not
        ids = [(drawn + (i % 3 == 2)) % model.config.vocab] if i % 7 else tokens(3, model.config.vocab)
        n += len(ids)


def test_output_that_is_not_finite_is_an_error_and_the_session_lives_on(device, opened):
    model = device.model("llama")
    model.norm.data[3] = float("nan")
    session = opened(model)
    for draw in (greedy(), table.Draw(0.7, 0.9, 0.0, 0.25, 5)):
        with pytest.raises(RuntimeError, match="not finite"):
            session.forward([1], 0, c.byref(draw))
        with pytest.raises(RuntimeError, match="not finite"):
            session.forward([1], 0, c.byref(draw), c.byref(draw))
    session.forward([1, 2, 3], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_memory_report_is_what_the_driver_gave(device, opened):
    model = RandomModel(Config(2, 2048, 8192, 32, 8, 64, 32000))
    opened(RandomModel(LLAMA))  # the context and the kernels are there
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    session = opened(model, context=65536)
    used = before - torch.cuda.mem_get_info()[0]
    assert abs(sum(session.memory().values()) - used) < 0.02 * used + (4 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_block_formats_are_read_as_the_runtime_reads_them(device):
    block_bytes = {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 12: 144, 13: 176, 14: 210}
    generator = torch.Generator().manual_seed(1)
    for kind, size in block_bytes.items():
        items = 256 if kind >= 12 else 32
        data = torch.randint(0, 256, (64, size), generator=generator, dtype=torch.uint8)
        # the scales' exponents: finite numbers of ordinary size
        for high_byte in {14: (209,), 12: (1, 3), 13: (1, 3), 3: (1, 3), 7: (1, 3)}.get(kind, (1,)):
            data[:, high_byte] = (data[:, high_byte] & 0x83) | 0x28
        n = 64 * items
        differ = device.lib.kilat_compare_format(
            c.c_int(kind), c.c_void_p(data.data_ptr()), c.c_int64(n), c.c_int64(data.numel())
        )
        # a value in the middle between two bf16 numbers may be on either side of it in fp32
        assert 0 <= differ <= n // 1000, f"type {kind}: {differ} of {n}"
