"""``python -m odin_nerfstudio.cli.bench.viewer_client PORT``: looks at a viewer of this machine as a browser does.

It connects, says where its camera is, and takes whatever comes, until it is ended. It imports next to nothing, since it
shares the machine with what is measured.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import websockets

CAMERA = {
    "type": "ViewerCameraMessage",
    "wxyz": (1.0, 0.0, 0.0, 0.0),
    "position": (0.0, 0.0, -10.0),
    "fov": 0.9,
    "aspect": 1.6,
    "look_at": (0.0, 0.0, 0.0),
    "up_direction": (0.0, -1.0, 0.0),
}
"""What viser's own client sends first."""


async def look(port: int) -> None:
    """Connects to a viewer and receives until the connection ends."""
    async with websockets.connect(f"ws://127.0.0.1:{port}", max_size=None) as connection:
        await connection.send(msgspec.msgpack.encode(CAMERA))
        async for _ in connection:
            pass


if __name__ == "__main__":
    asyncio.run(look(int(sys.argv[1])))
