"""An expert server computes with the indices it received, although their sender writes into the shared memory afterwards."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import torch

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import from_message
from flowrt.exchange.expert_service import ExpertService
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.weights import Checkpoint
from flowrt.transports.conformance.connection_checks import HERE, KEY
from flowrt.transports.contract import Limits
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.message import Tag

MODEL = Path(__file__).parents[2] / "examples" / "tiny-moe"
ROWS, PAIRS = 64, 2048


@pytest.mark.skipif(unavailable_reason("shm") is not None, reason=str(unavailable_reason("shm")))
@pytest.mark.parametrize("strict", [False, True])
async def test_peer_that_writes_over_its_part_crashes_no_server(strict: bool) -> None:
    config = read_model_config(MODEL, "float32")
    layer = config.moe_layers[0]
    service = ExpertService(Experts(config, Checkpoint(MODEL), {layer: [0]}), strict)
    async with await get_transport("shm").listen("shm://", Limits(), KEY, HERE) as listener:
        peer = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("writing_peer.py")),
            listener.address,
            *map(str, (ROWS, PAIRS, config.hidden_size)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            async with await listener.accept() as channel:
                payload = from_message(await channel.recv())
                x_RH, row_P, expert_P, _ = payload.tensors
                while not x_RH.isnan().any():  # noqa: ASYNC110 - rows are not copied, so the writing of another process shows
                    await asyncio.sleep(0.001)
                for _ in range(10):
                    (outputs,) = service([Firing("experts", Tag("client@1", layer=layer), {"rows": payload})])
                    (y,) = outputs["results"].tensors
                    assert y.shape == (PAIRS if strict else ROWS, config.hidden_size)
                assert torch.equal(row_P, torch.arange(PAIRS) % ROWS)
                assert not expert_P.any()
        finally:
            peer.kill()
            await peer.wait()
