"""What rank 0 hears of the others' steps, and shows of their tiles: on two real ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from xl_runs import make_config, make_rays

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.segments import WIDTH
from odin_nerfstudio.nerfxl.trainer import NerfXLTrainer
from odin_nerfstudio.viewer.trace import read_trace

TILES, STEPS, RAYS = 3, 8, 64


def look_from_a_thread(trainer: NerfXLTrainer) -> torch.Tensor:
    """Colours of some rays as a viewer's thread renders them, which must not wait for another rank."""
    seen: list[torch.Tensor] = []

    def look() -> None:
        with torch.no_grad():
            seen.append(trainer.pipeline.model.get_outputs(make_rays())["rgb"])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    return seen[0]


def train(world: World, capture: Path, output: Path) -> tuple[Path, list[torch.Tensor]]:
    """One rank of a run; its folder, and what it renders together, alone in between, and alone with a limit."""
    config = make_config(capture, output, TILES, max_num_iterations=STEPS)
    config.logging.steps_per_log = 2
    trainer = config.setup(local_rank=world.rank, world_size=world.size)
    assert isinstance(trainer, NerfXLTrainer)
    trainer.setup()
    trainer.train()
    pipeline, model = trainer.pipeline, trainer.pipeline.model
    model.eval()
    with model.together(), torch.no_grad():
        together = model.get_outputs(make_rays())["rgb"]
        alone = look_from_a_thread(trainer)
    model.others.clear()
    pipeline.config.viewer_max_gib = 1e-9
    pipeline._next_show = 0.0
    pipeline.meet(STEPS, show=world.rank == 0)
    assert not model.others
    return config.get_base_dir(), [together, alone, look_from_a_thread(trainer)]


@pytest.fixture(scope="module")
def ranks(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[torch.Tensor]]]:
    return run_ranks(2, train, demo_capture, tmp_path_factory.mktemp("xl"), timeout=240)


def test_rank_0_shows_all_tiles_without_the_other_rank(ranks: list[tuple[Path, list[torch.Tensor]]]) -> None:
    together, alone, limited = ranks[0][1]
    torch.testing.assert_close(alone, together)
    assert not torch.allclose(limited, together)  # without copies it shows its own tiles
    assert not torch.allclose(ranks[1][1][1], together)  # as the other rank does


def test_the_trace_tells_of_every_step_and_tile(ranks: list[tuple[Path, list[torch.Tensor]]]) -> None:
    recording = read_trace(ranks[0][0] / "odin_trace.json")
    assert recording.steps() == list(range(STEPS)) and recording.world_size == 2
    for step in range(STEPS):
        counts = [timeline.counts(step) for timeline in recording.timelines]
        held = [{name for name in each if name.startswith("tile ")} for each in counts]
        assert held == [{"tile 0"}, {"tile 1", "tile 2"}]
        assert [each["bytes"] for each in counts] == [4 * WIDTH * RAYS, 4 * WIDTH * RAYS * 2]
        assert recording.conflicts(step) is None
        names = [{span.name for span in timeline.spans(step)} for timeline in recording.timelines]
        assert all({"fields", "tile", "segments", "backward", "shared gradients", "step"} <= each for each in names)
    samples = sum(recording.timelines[rank].counts(0)[f"tile {tile}"] for rank, tile in ((0, 0), (1, 1), (1, 2)))
    assert 0 < samples <= RAYS * 16  # half of the samples before occupancy grids know anything


def test_scalars_are_written_as_often_as_others(ranks: list[tuple[Path, list[torch.Tensor]]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recording = read_trace(ranks[0][0] / "odin_trace.json")
    events = EventAccumulator(str(ranks[0][0]), size_guidance={"scalars": 0})
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("Odin/bytes")}
    assert shown == {step: recording.unit(step).bytes for step in range(0, STEPS, 2)}
    assert "Odin/early_share" not in events.Tags()["scalars"]
