"""The CUDA kernels of the lazy optimizer against their float64 twin, and the optimizer on the device."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.adam import AdamConstants, AdamRows, MissedSteps, reference
from odin_nerfstudio.shadow.adam.state import flat
from odin_nerfstudio.shadow.optimizer import LazyAdam, announce_all, catch_up_rows, drift_of, take_rows

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(3,), (3,), (4,), (3,), (15, 3), (1,)]
"""Of splatfacto's parameters."""
MANY = [*SHAPES, (0, 3), (300,), (2,)]
"""More than fit in a launch, one wider than a block."""
START = 7


@pytest.fixture(scope="module")
def cuda():
    from odin_nerfstudio.shadow.adam import cuda as module

    kernels.load("adam_rows", torch.cuda.get_device_capability())
    return module


@pytest.fixture
def no_waiting():
    """Calls that wait for the device are errors."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_missed(constants: AdamConstants, steps: int) -> MissedSteps:
    missed = MissedSteps(constants, START, torch.device("cuda"))
    for step in range(steps):
        missed.append(1e-3 * (1 + step / 300))
    return missed


def make_rows(shape: tuple[int, ...], n: int, missed: MissedSteps, generator: torch.Generator) -> AdamRows:
    """Rows that have missed none, some or all steps, with moments from where ε does not matter to where it rules."""
    magnitude = 10 ** (-14 * torch.rand(n, *shape, generator=generator))
    exp_avg, exp_avg_sq = magnitude * torch.randn(n, *shape, generator=generator), magnitude**2
    exp_avg[torch.rand(n, *shape, generator=generator) < 0.1] = 0
    exp_avg_sq[torch.rand(n, *shape, generator=generator) < 0.02] = 0
    row_step = torch.randint(START, missed.now + 1, (n,), generator=generator).float()
    row_step[::4], row_step[1::4] = missed.now, max(START, missed.now - 2)
    values = torch.randn(n, *shape, generator=generator)
    return AdamRows(values.cuda(), exp_avg.cuda(), exp_avg_sq.cuda(), row_step.cuda(), missed)


def copy(params: list[AdamRows], dtype: torch.dtype = torch.float64) -> list[AdamRows]:
    return [AdamRows(*(t.to(dtype, copy=True) for t in p[:3]), p.row_step.clone(), p.missed) for p in params]


def assert_agree(found: list[AdamRows], expected: list[AdamRows], scale: float = 1.0) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        # Moves are sums of up to 400 terms of one sign, and about as large as the values.
        torch.testing.assert_close(ours.values.double(), theirs.values, rtol=5e-6, atol=5e-6 * scale)
        for a, b in ((ours.exp_avg, theirs.exp_avg), (ours.exp_avg_sq, theirs.exp_avg_sq)):
            torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=1e-37 + 1e-6 * (scale > 1))
        assert torch.equal(ours.row_step, theirs.row_step)


def assert_untouched(found: list[AdamRows], before: list[AdamRows], touched: Tensor) -> None:
    left = torch.ones(len(found[0].values), dtype=torch.bool)
    left[touched.cpu()] = False
    for ours, theirs in zip(found, before, strict=True):
        for a, b in zip(ours[:4], theirs[:4], strict=True):
            assert torch.equal(a.cpu()[left], b.cpu()[left])


CONSTANTS = [AdamConstants(0.9, 0.999, 1e-15), AdamConstants(0.9, 0.999, 1e-8), AdamConstants(0.9**4, 0.999**4, 5e-16)]


@needs_cuda
@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("steps", [0, 1, 50, 2500])
@pytest.mark.parametrize(("n", "shapes"), [(0, SHAPES), (1, MANY), (32, SHAPES), (777, MANY), (50, [(0, 3)])])
def test_catching_up_is_the_twins(cuda, constants, steps, n, shapes) -> None:
    generator = rng(n + steps)
    missed = make_missed(constants, steps)
    params = [make_rows(shape, n + 40, missed, generator) for shape in shapes]
    twins, before = copy(params), copy(params, torch.float32)
    rows = torch.randperm(n + 40, generator=generator)[:n].cuda()
    cuda.catch_up(params, rows)
    for twin in twins:
        reference.catch_up(twin, rows)
    assert_agree(params, twins)
    assert_untouched(params, before, rows)
    cuda.catch_up(params, None)
    for twin in twins:
        reference.catch_up(twin, torch.arange(n + 40, device="cuda"))
    assert_agree(params, twins)
    done = copy(params, torch.float32)
    cuda.catch_up(params, None)
    assert_untouched(params, done, rows[:0])


@needs_cuda
@pytest.mark.parametrize("age", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "shapes"), [(0, SHAPES), (1, MANY), (32, SHAPES), (777, MANY), (50, [(0, 3)])])
def test_taking_a_step_is_the_twins(cuda, age, masked, n, shapes) -> None:
    generator = rng(n + age)
    missed = make_missed(CONSTANTS[0], 5)
    params = [make_rows(shape, n + 40, missed, generator) for shape in shapes]
    twins, before = copy(params), copy(params, torch.float32)
    rows = torch.randperm(n + 40, generator=generator)[:n].cuda()
    grads = [torch.randn(n, *shape, generator=generator).cuda() for shape in shapes]
    active = (torch.rand(n, generator=generator) < 0.5).cuda() if masked else None
    cuda.take(params, rows, grads, active, age)
    for twin, grad in zip(twins, grads, strict=True):
        reference.take(twin, rows, flat(grad.double()), active, age)
    assert_agree(params, twins, scale=2.0)
    assert_untouched(params, before, rows if active is None else rows[active])


@needs_cuda
@pytest.mark.parametrize("constants", CONSTANTS)
def test_announcing_is_the_twins(cuda, constants, no_waiting) -> None:
    ours, theirs = ([MissedSteps(constants, START, torch.device("cuda")) for _ in MANY] for _ in range(2))
    for step in range(1100):  # the tables grow on the way
        rates = [1e-3 * (1 + step / 300) / (1 + i) for i in range(len(MANY))]
        cuda.announce(list(zip(ours, rates, strict=True)))
        for missed, lr in zip(theirs, rates, strict=True):
            missed.append(lr)
    torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.tables, b.tables, rtol=1e-12, atol=0)
        assert a.now == b.now


@needs_cuda
def test_rows_of_a_slice(cuda) -> None:
    """splatfacto's first parameters are slices of one tensor."""
    missed, n = make_missed(CONSTANTS[0], 20), 100
    whole = torch.randn(n, 16, 3, generator=rng(1)).cuda()
    dense = make_rows((15, 3), n, missed, rng())
    sliced = AdamRows(whole[:, 1:], *(t.clone() for t in dense[1:4]), missed)
    twin, outside = copy([sliced])[0], whole[:, 0].clone()
    assert not sliced.values.is_contiguous()
    rows = torch.arange(0, n, 3, device="cuda")
    grad = torch.randn(len(rows), 15, 3, generator=rng(2)).cuda()
    cuda.catch_up([sliced], rows)
    cuda.take([sliced], rows, [grad], None, 0)
    twin = AdamRows(twin.values.contiguous(), *twin[1:])
    reference.catch_up(twin, rows)
    reference.take(twin, rows, flat(grad.double()), None, 0)
    assert_agree([sliced], [twin], scale=2.0)
    assert torch.equal(whole[:, 0], outside)


class Scene:
    """Optimizers of splatfacto's parameters, which take random steps on random rows, the same on every device."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, n: int = 500) -> None:
        self.device, self.n, self.dtype, self.generator = device, n, dtype, rng(3)
        self.shapes = {str(i): shape for i, shape in enumerate(SHAPES)}
        start = {name: torch.randn(n, *shape, generator=self.generator) for name, shape in self.shapes.items()}
        self.params = {name: torch.nn.Parameter(value.to(device, dtype)) for name, value in start.items()}
        self.optimizers = {name: LazyAdam([p], lr=1e-2, eps=1e-15) for name, p in self.params.items()}

    def draw(self) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        rows = (torch.rand(self.n, generator=self.generator) < 0.3).nonzero()[:, 0]
        size = 10 ** (-6 * torch.rand(len(rows), 1, generator=self.generator))
        grads = {
            name: (torch.randn(len(rows), *shape, generator=self.generator) * size.view(-1, *[1] * len(shape)))
            for name, shape in self.shapes.items()
        }
        active = torch.rand(len(rows), generator=self.generator) < 0.7
        moved = {name: grad.to(self.device, self.dtype) for name, grad in grads.items()}
        return rows.to(self.device), moved, active.to(self.device)

    def run(self, steps: int) -> None:
        for step in range(steps):
            rows, grads, active = self.draw()
            for optimizer in self.optimizers.values():
                optimizer.param_groups[0]["lr"] = 1e-2 * 0.99**step
            catch_up_rows(self.optimizers, rows)
            announce_all(self.optimizers)
            if step % 2:
                announce_all(self.optimizers)
            take_rows(self.optimizers, rows, grads, active, age=step % 2)
            for optimizer in self.optimizers.values():
                optimizer.step()
        assert drift_of(self.optimizers["0"], 1) is not None
        catch_up_rows(self.optimizers)


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_the_optimizers_on_the_device_are_those_on_the_cpu(cuda, dtype, tolerance) -> None:
    """float32 takes the kernel, float64 the torch twin."""
    here, there = Scene("cpu", dtype), Scene("cuda", dtype)
    for scene in (here, there):
        scene.run(120)
    for name, param in here.params.items():
        torch.testing.assert_close(there.params[name].cpu(), param, rtol=tolerance, atol=tolerance)
        for optimizer in (here.optimizers[name], there.optimizers[name]):
            assert optimizer.drift().max() == 0  # type: ignore[union-attr]


@needs_cuda
def test_no_call_waits_for_the_device(cuda) -> None:
    scene = Scene("cuda")
    draws = [scene.draw() for _ in range(3)]
    announce_all(scene.optimizers)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows, grads, active in draws:
            catch_up_rows(scene.optimizers, rows)
            announce_all(scene.optimizers)
            take_rows(scene.optimizers, rows, grads, active)
            take_rows(scene.optimizers, rows, grads, age=1)
            drift_of(scene.optimizers["0"], 2)
            for optimizer in scene.optimizers.values():
                optimizer.step()
        catch_up_rows(scene.optimizers)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_without_a_compiler_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, capability: tuple[int, int]) -> None:
        raise kernels.KernelUnavailable("There is no compiler.")

    monkeypatch.setattr(kernels, "load", missing)
    kernels.available.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            here, there = Scene("cpu"), Scene("cuda")
            for scene in (here, there):
                scene.run(20)
    finally:
        kernels.available.cache_clear()
    assert sum("adam_rows" in str(warning.message) for warning in caught) == 1
    for name, param in here.params.items():
        torch.testing.assert_close(there.params[name].cpu(), param, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_functions(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    library = kernels.load.__wrapped__("adam_rows", capability)
    for name in ("adam_announce", "adam_catch_up", "adam_take"):
        assert hasattr(library, name)
