"""``odin-bench step`` and ``ablation`` on a small city: their figures, never their times."""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

import pytest
import torch

from odin_nerfstudio.cli.bench.ablation import AblationBench
from odin_nerfstudio.cli.bench.step import StepBench
from odin_nerfstudio.cli.bench.step.bench import CityBench
from odin_nerfstudio.cli.bench.step.city import ALTITUDE, HELD_OUT, City, Ground
from odin_nerfstudio.cli.bench.step.ours import CityData, Unvalidated
from odin_nerfstudio.cli.bench.step.system import Site
from odin_nerfstudio.cli.bench.step.turns import FIRST_STEP, Task, read_reports, take_turns
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.graph import ShadowGraph

SMALL: dict[str, Any] = {
    "num_primitives": 3000,
    "num_views": 12,
    "width": 64,
    "height": 48,
    "device": "cpu",
    "rounds": 2,
    "steps": 3,
    "warmup": 2,
    "recorded": 4,
    "timeout_s": 600,
}


@pytest.fixture
def city() -> City:
    return City(num_primitives=3000, num_views=12, width=64, height=48, seed=5)


def test_systems_take_the_same_steps() -> None:
    bench = StepBench(**SMALL, systems=("barrier", "quality", "throughput", "replicated-quality"))
    figures = bench.run()
    assert json.loads(json.dumps(figures)) == figures
    systems = figures["systems"]
    assert list(systems) == list(bench.systems)
    for each in systems.values():
        assert 0 < each["step_ms_p10"] <= each["step_ms"] <= each["step_ms_p90"] and each["host_step_ms"] > 0
        assert each["bytes"] > 0 and each["exposed_wait_ms"] > 0 and 0 <= each["hidden_fraction"] <= 1
        assert each["memory_gib"] is each["ratio_gsplat"] is each["ratio_floor"] is None
        assert 0 < each["visible"] <= 3000
    barrier, quality, replicated = (systems[name] for name in ("barrier", "quality", "replicated-quality"))
    # The same training, whatever is read when and wherever primitives are.
    assert barrier["error"] == quality["error"] == replicated["error"]
    assert barrier["scope"] == quality["scope"] and replicated["scope"] == 2 * quality["scope"]
    assert barrier["early_share"] == barrier["hidden_of_barrier"] == 0 < quality["early_share"] < 1
    assert figures["hidden_of_barrier"] == pytest.approx(1 - quality["exposed_wait_ms"] / barrier["exposed_wait_ms"])
    assert replicated["hidden_of_barrier"] is None  # its own barrier did not run


def test_ablation_leaves_out_what_it_says() -> None:
    figures = AblationBench(**SMALL | {"rounds": 1}, rebuild=True).run()
    assert json.loads(json.dumps(figures)) == figures
    parts = figures["parts"]
    assert list(parts) == ["full", "no-overlap", "no-locality", "no-validation", "no-shards"]
    assert parts["full"]["ratio_full"] == 1 and parts["no-overlap"]["ratio_full"] > 0
    assert parts["no-overlap"]["early_share"] == 0 and parts["no-validation"]["early_share"] == 1
    assert parts["full"]["error"] == parts["no-overlap"]["error"] == parts["no-shards"]["error"]
    assert parts["no-validation"]["error"] != parts["full"]["error"] != parts["no-locality"]["error"]


def test_peers_train(city: City, tmp_path, monkeypatch) -> None:
    """Everything of the peers but gsplat's kernels."""
    rendering = pytest.importorskip("gsplat.rendering")
    rendered = []

    def rasterization(means, quats, scales, opacities, colors, viewmats, Ks, width, height, **options):
        assert len(means) == len(quats) == len(scales) and opacities.shape == (len(means),)
        assert colors.shape == (len(means), 16, 3) and viewmats.shape == (2, 4, 4) and Ks.shape == (2, 3, 3)
        assert options == {"sh_degree": 3, "packed": True, "distributed": False}
        rendered.append(len(means))
        sums = (value.flatten(1).mean(1) for value in (means, quats, scales, opacities[:, None]))
        shade = (sum(sums)[:, None] + colors.mean(1)).mean(0)
        seen = torch.arange(0, len(means), 3)
        return shade.expand(2, height, width, 3), None, {"radii": torch.ones(len(seen)), "gaussian_ids": seen}

    monkeypatch.setattr(rendering, "rasterization", rasterization)
    task = Task(city, ("gsplat", "ddp", "floor"), 2, rounds=1, steps=3, warmup=1, recorded=2, rebuild=False)
    take_turns(World.current(), task, str(tmp_path))
    reports = read_reports(str(tmp_path), 1)
    for (measured,) in reports.values():
        assert len(measured.seconds) == 3 and len(measured.visible) == 2 and measured.overlap is None
    assert reports["gsplat"][0].visible == [500, 500]  # a third of the rows, over two views
    assert set(rendered) == {3000, 1000}


@pytest.mark.parametrize(
    ("bench", "flag"),
    [
        (StepBench(**SMALL, systems=("barrier", "gsplat")), "--systems gsplat"),
        (StepBench(**SMALL, systems=("barrier", "barrier")), "--systems"),
        (StepBench(**SMALL | {"num_views": 1}), "--num-views"),
        (StepBench(**SMALL | {"rounds": 0}), "--rounds"),
        (StepBench(**SMALL, side=200.0), "--side 200"),
        (StepBench(**SMALL | {"device": "cuda", "world_size": 99}), "--world-size"),
        (AblationBench(**SMALL, parts=()), "--parts"),
    ],
)
def test_mistakes_name_the_flag(bench: CityBench, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        bench.run()


def test_cameras_agree(city: City) -> None:
    """The two conventions name the same cameras, and the plan's are those that are trained on."""
    poses = torch.nn.functional.pad(city.camera_to_worlds(), (0, 0, 0, 1))
    poses[:, 3, 3] = 1
    axes = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert torch.allclose(torch.linalg.inv(poses @ axes), city.viewmats(), atol=1e-4)
    site = Site.build(World.current(), city, views_per_rank=1)
    camera = CityData(city, site.plan).train_camera(3)
    assert torch.equal(camera.camera_to_worlds[0], poses[3, :3])
    assert torch.equal(camera.get_intrinsics_matrices()[0], city.K())
    assert len(site.plan.capture.cameras) == 12 and site.plan.schedule.group(FIRST_STEP).views.max() < 12


def test_images_are_windows_of_one_ground(city: City) -> None:
    ground, centres, pixel = Ground(city, torch.device("cpu")), city.centres(), ALTITUDE / city.focal
    images = [ground.image(view) for view in range(12 + HELD_OUT)]
    assert all(image.shape == (48, 64, 3) and 0 <= image.min() <= image.max() <= 1 for image in images)
    compared = 0
    for (a, here), (b, there) in permutations(enumerate(centres), 2):
        right, up = ((there - here)[:2] / pixel).round().int().tolist()
        if 0 <= right < 60 and 0 <= up < 44:
            common, other = images[a][1 : 47 - up, right + 1 : 63], images[b]
            shifts = product((-1, 0, 1), repeat=2)  # of each window's place half a pixel may have been rounded off
            errors = [(common - other[1 + up + j : 47 + j, 1 + i : 63 - right + i]).abs().max() for i, j in shifts]
            assert min(errors) == 0
            compared += 1
    assert compared > 5


def test_unvalidated_reads_everything_early() -> None:
    def rows(*numbers: int) -> Bitmap:
        return Bitmap.from_rows(torch.tensor(numbers), 4)

    graph = ShadowGraph(4, lambda step, rows, gradients, chosen: None, Unvalidated())
    first = graph.admit(0, rows(0, 1, 2))
    assert graph.early(first).rows().tolist() == [0, 1, 2]
    second = graph.admit(1, rows(1, 2, 3))
    assert graph.early(second).rows().tolist() == [1, 2, 3] and second.stale.rows().tolist() == [1, 2]
    assert not graph.policy.held(second)
    for unit, active in ((first, [0, 1]), (second, [1, 3])):
        assert not graph.late(unit)
        graph.backward(unit, rows(*active))
        graph.stage(unit, torch.tensor(active), {"means": torch.ones(2, 3)})
        graph.publish(unit)
    assert graph.versions.tolist() == [0, 1, -1, 1]
