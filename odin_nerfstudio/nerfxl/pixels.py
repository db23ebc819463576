"""All pixels of a set of images in one array, and draws from it that depend on seed and step alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from odin_nerfstudio.data.dataset import UndistortedDataset
from odin_nerfstudio.data.loader import ViewLoader
from odin_nerfstudio.draws import keyed_generator
from odin_nerfstudio.errors import UserError

_NO_BUDGET = 1 << 62


@dataclass(frozen=True)
class PixelStore:
    """The pixels of V images, one after the other, row by row; images may differ in size."""

    values: Tensor
    """(P, 3 or 4) uint8."""
    first: Tensor
    """(V,) int64 row of each image's first pixel."""
    widths: Tensor
    """(V,) int64."""
    visible: Tensor | None
    """(M,) int64 rows that the masks leave; None where there are no masks."""

    @property
    def count(self) -> int:
        """Number of pixels to draw from."""
        return len(self.values if self.visible is None else self.visible)

    @staticmethod
    def read(dataset: UndistortedDataset, device: torch.device, description: str) -> PixelStore:
        """Decodes all images of a dataset, several at a time, with a progress bar.

        Raises:
            UserError: naming the file that cannot be decoded; or when masks leave nothing.
        """
        views = ViewLoader(dataset, _NO_BUDGET)
        views.fill(description)
        batches = [views.get(index) for index in range(len(dataset))]
        images = [batch["image"].flatten(0, 1) for batch in batches]
        if len({image.shape[1] for image in images}) > 1:
            images = [functional.pad(image, (0, 4 - image.shape[1]), value=255) for image in images]
        sizes = torch.tensor([len(image) for image in images])
        visible = None
        if any("mask" in batch for batch in batches):
            masks = [
                batch["mask"].reshape(-1) if "mask" in batch else torch.ones(len(image), dtype=torch.bool)
                for batch, image in zip(batches, images, strict=True)
            ]
            visible = torch.cat(masks).nonzero()[:, 0].to(device)
            if not len(visible):
                raise UserError("The masks of the capture leave no pixel to train on: white is what is kept.")
        widths = torch.tensor([batch["image"].shape[1] for batch in batches])
        return PixelStore(torch.cat(images).to(device), sizes.cumsum(0) - sizes, widths, visible)

    def take(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels by number.

        Args:
            draws: (R,) int64 below ``count``, on the CPU.

        Returns:
            (R, 3) int64 image, row and column, on the CPU unless there are masks; (R, 3 or 4) uint8.
        """
        rows = draws if self.visible is None else self.visible[draws.to(self.visible.device)].cpu()
        image = torch.searchsorted(self.first, rows, right=True) - 1
        within, width = rows - self.first[image], self.widths[image]
        indices = torch.stack([image, within // width, within % width], dim=1)
        return indices, self.values[rows.to(self.values.device)]


class KeyedPixelSampler:
    """Draws pixels, all equally likely, the same in any process.

    nerfstudio's exporters set ``num_rays_per_batch`` and then ask for step 0 again and again: each time that a step is
    asked for once more, its draws are others.

    Args:
        num_rays_per_batch: pixels of a draw.
        purpose: draws for different purposes are independent.
    """

    def __init__(self, num_rays_per_batch: int, purpose: str) -> None:
        self.num_rays_per_batch = num_rays_per_batch
        self._purpose = purpose
        self._last = (-1, 0)

    def sample(self, seed: int, step: int, count: int) -> Tensor:
        """(``num_rays_per_batch``,) int64 below ``count``, with repetition, on the CPU."""
        last, times = self._last
        self._last = (step, times + 1 if step == last else 0)
        generator = keyed_generator(seed, self._purpose, *self._last)
        return torch.randint(count, (self.num_rays_per_batch,), generator=generator)
