"""What the data managers of both methods do with a capture before they hand anything out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.data.datamanagers.base_datamanager import DataManager

from odin_nerfstudio.data.capture import check_folder, colmap_model_of, leave_points_to_us, parsing, seed_points_of
from odin_nerfstudio.data.dataset import UndistortedDataset
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.cameras import check_poses


class CaptureManager(DataManager):
    """Reads a capture and says what is wrong with it. To be named before one of nerfstudio's data managers.

    Raises:
        UserError: when the capture is missing, empty or malformed.
    """

    train_dataset: UndistortedDataset
    eval_dataset: UndistortedDataset
    seed: int = 0
    """Seed of what is drawn; set by the pipeline."""

    def __init__(
        self,
        config: Any,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        data = config.data or config.dataparser.data
        check_folder(data)
        from_model = leave_points_to_us(data, config.dataparser)
        with parsing(data, config.dataparser):
            super().__init__(config, device, test_mode, world_size, local_rank, **kwargs)
            cameras, names = self.train_dataset.cameras, [path.name for path in self.train_dataset.image_filenames]
            check_poses(cameras.camera_to_worlds.numpy(), names, str(data))
        if from_model and test_mode == "val":  # elsewhere a checkpoint has what they were for
            self._take_seed_points_from_model()
        if test_mode != "inference":
            self.train_dataset.check_files()
            self.eval_dataset.check_files()

    def create_train_dataset(self) -> UndistortedDataset:
        """The training images.

        Raises:
            UserError: when the data parser keeps none for training.
        """
        dataset = super().create_train_dataset()
        if not len(dataset):
            raise UserError(
                f"{self.get_datapath()}: no image is left for training. Choose another --eval-mode of the dataparser."
            )
        return dataset

    def colmap_model(self) -> Path | None:
        """The folder of the capture's COLMAP model, if it has one."""
        return colmap_model_of(self.get_datapath(), self.config.dataparser)

    def _take_seed_points_from_model(self) -> None:
        """Puts the COLMAP model's points where the data parser would have put those of a point cloud."""
        folder, outputs = self.colmap_model(), self.train_dataparser_outputs
        if folder is not None:
            seeds = seed_points_of(folder, outputs, self.train_dataset.cameras)
            outputs.metadata.update(seeds)
            self.train_dataset.metadata.update(seeds)
