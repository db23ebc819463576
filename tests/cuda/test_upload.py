"""Views that are copied to the device ahead of their turn."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from odin_nerfstudio.data.loader import ViewLoader
from odin_nerfstudio.data.upload import DeviceViews
from odin_nerfstudio.errors import UserError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HEIGHT, WIDTH = 300, 401
BYTES = HEIGHT * WIDTH * 3


class Pictures:
    """A dataset of plain images: the one with number i is full of i."""

    def __init__(self, count: int, broken: int = -1) -> None:
        self.count, self.broken = count, broken
        self.decoded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def get_data(self, index: int, image_type: str) -> dict[str, Any]:
        if index == self.broken:
            raise UserError("cut.jpg: cannot be decoded")
        self.decoded.append(index)
        image = torch.full((HEIGHT, WIDTH, 3), index, dtype=torch.uint8)
        return {"image": image, "mask": torch.full((HEIGHT, WIDTH, 1), index % 2 == 0), "image_idx": index}


def make_views(pictures: Pictures, host_views: int = 100, device_views: int = 0) -> DeviceViews:
    size = BYTES + HEIGHT * WIDTH
    loader = ViewLoader(pictures, host_views * size)  # type: ignore[arg-type]
    return DeviceViews(loader, torch.device("cuda", 0), device_views * size)


@pytest.mark.parametrize("host_views", [0, 3, 100])
@pytest.mark.parametrize("device_views", [0, 3, 100])
def test_views_are_the_datasets_in_any_order(host_views: int, device_views: int) -> None:
    pictures = Pictures(10)
    views = make_views(pictures, host_views, device_views)
    found = []
    for turn in range(60):
        index = turn * 7 % 10
        views.prefetch([index, (index + 7) % 10, (index + 14) % 10])
        view = views.get(index)
        assert view["image"].device == view["mask"].device == torch.device("cuda", 0)
        assert view["image"].dtype == torch.uint8 and view["image_idx"] == index
        # Nothing is read back until the end, so a copy that nobody waited for, or memory used twice, shows.
        found.append((index, view["image"].amin(), view["image"].amax(), view["mask"].all()))
        del view
    for index, low, high, kept in found:
        assert (int(low), int(high), bool(kept)) == (index, index, index % 2 == 0)
    assert len(views._kept) == min(device_views, 10)
    if device_views == 100 or host_views == 100:
        assert sorted(pictures.decoded) == list(range(10))


def test_a_view_is_whole_however_busy_the_device() -> None:
    views = make_views(Pictures(40))
    busy = torch.rand(4096, 4096, device="cuda")
    sums = []
    for index in range(40):
        views.prefetch(range(index, min(index + 4, 40)))
        for _ in range(3):
            busy = (busy @ busy).clamp_(0, 1)
        image = views.get(index)["image"]
        sums.append((image == index).all())
        del image
    assert all(map(bool, sums))


def test_host_waits_for_no_copy() -> None:
    views = make_views(Pictures(4), device_views=2)
    views.prefetch(range(4))
    time.sleep(0.5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in (0, 1, 2, 3, 0, 1):
            views.get(index)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_view_that_cannot_be_decoded_is_named_when_it_is_wanted() -> None:
    views = make_views(Pictures(3, broken=1))
    views.prefetch(range(3))
    assert views.get(0)["image_idx"] == 0
    with pytest.raises(UserError, match=r"cut\.jpg"):
        views.get(1)
    assert views.get(2)["image_idx"] == 2


def test_dictionaries_are_copies() -> None:
    views = make_views(Pictures(1), device_views=1)
    views.get(0)["extra"] = 1
    assert "extra" not in views.get(0)
