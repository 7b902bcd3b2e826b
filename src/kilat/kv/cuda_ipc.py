"""Pages in the memory of a CUDA device of this host: a peer's pool is mapped through CUDA IPC and copied from on a stream of its own.

The handle is carried as plain values and opened with torch's own storage functions; nothing is unpickled. Whether pages are still
offered is read from the owner's board (``kv/board.py``), after the device has finished the copy. The owner offers pages only when the
steps that wrote them are finished on the device. Pools may lie on different devices as long as both processes see both.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from kilat.base.errors import ConfigError, PeerError
from kilat.kv.board import BOARD_BYTES, Board, PeerBoard
from kilat.kv.jobs import Job, Jobs
from kilat.kv.mapping import host_id, map_file
from kilat.kv.transport import WITHDRAWN, Done, compare_layout, layout_digest
from kilat.wire.kv import Endpoint, KvLayout, Offer

FIRST_BYTES, MOST_BYTES = 128 << 20, 1 << 30
"""Bytes of the first launch, and of the largest: each is twice the one before. The device starts soon, and packing the next page numbers
takes less time than the copy that runs: half a millisecond for the largest."""
AHEAD = 2
"""Launches that wait behind the one that runs, so that the device never waits for this process."""


class CudaAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pool's IPC handle as torch gives it, the device by its UUID, and where the board is mapped from."""

    host: str
    pid: int
    device: str
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool
    view_offset: int
    n_pages: int
    board_fd: int
    nonce: bytes
    layout: bytes


CopyPages = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``copy_pages`` of kv/cuda_copy.py, handed in because it needs a compiler for the device."""


@dataclass(frozen=True)
class _Peer:
    words: Tensor
    board: PeerBoard


class CudaIpcTransport:
    """See :class:`kilat.kv.transport.Transport`. ``view``: uint8 [n_pages, page_bytes] on a CUDA device, contiguous, owned by the engine.
    ``copy`` moves pages between pools on that device.

    Raises ConfigError for another tensor, or when the board is not in shared memory.
    """

    kind = "cuda_ipc"

    def __init__(self, layout: KvLayout, view: Tensor, board: Board, copy: CopyPages) -> None:
        if (
            view.device.type != "cuda"
            or not view.is_contiguous()
            or layout.page_bytes % 8
            or board.fd is None
        ):
            raise ConfigError(
                "cuda_ipc needs a contiguous pool on a CUDA device and a board in shared memory"
            )
        self._layout = layout
        self._view = view
        self._words = view.view(torch.int64)
        self._copy_pages = copy
        self._endpoint = self._describe(board, board.fd)
        self._peers: dict[str, _Peer] = {}
        self._stream = torch.cuda.Stream(view.device)
        self._jobs = Jobs(self.kind, len(view), self._bytes_of)
        self._lane = self._jobs.lane(self._copy)

    def _describe(self, board: Board, board_fd: int) -> Endpoint:
        storage = self._view.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
        address = CudaAddress(
            host=host_id(),
            pid=os.getpid(),
            device=_uuid(self._view.device),
            handle=bytes(handle),
            storage_bytes=size,
            storage_offset=offset,
            counter=bytes(counter),
            counter_offset=counter_offset,
            event=bytes(event),
            event_sync=event_sync,
            view_offset=int(self._view.storage_offset()),
            n_pages=len(self._view),
            board_fd=board_fd,
            nonce=board.nonce,
            layout=layout_digest(self._layout),
        )
        return Endpoint(self.kind, msgspec.msgpack.encode(address))

    def endpoint(self) -> Endpoint:
        return self._endpoint

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        try:
            address = msgspec.msgpack.decode(endpoint.address, type=CudaAddress)
        except msgspec.MsgspecError as e:
            raise PeerError(f"the address of worker {worker_id} could not be read: {e}") from e
        compare_layout(self._layout, address.layout)
        if address.host != host_id():
            raise PeerError(f"worker {worker_id} is on another host")
        if address.pid == os.getpid():
            raise PeerError("CUDA IPC does not map memory of the own process")
        try:
            board = PeerBoard(map_file(address.pid, address.board_fd, BOARD_BYTES), address.nonce)
            words = self._open(address)
        except (OSError, ValueError, RuntimeError) as e:
            raise PeerError(f"the pages of worker {worker_id} cannot be mapped ({type(e).__name__})") from e
        self.forget(worker_id)
        self._peers[worker_id] = _Peer(words, board)

    def _open(self, a: CudaAddress) -> Tensor:
        """The peer's pool, int64 [n_pages, page_bytes / 8], in this process's address space."""
        device = next(
            (i for i in range(torch.cuda.device_count()) if _uuid(torch.device("cuda", i)) == a.device), None
        )
        if device is None:
            raise ValueError("the device is not visible here")
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            a.handle,
            a.storage_bytes,
            a.storage_offset,
            a.counter,
            a.counter_offset,
            a.event,
            a.event_sync,
        )
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        end = a.view_offset + a.n_pages * self._layout.page_bytes
        if end > len(whole):
            raise ValueError("the pool is smaller than was said")
        return whole[a.view_offset : end].view(a.n_pages, self._layout.page_bytes).view(torch.int64)

    def forget(self, worker_id: str) -> None:
        if self._peers.pop(worker_id, None) is not None:
            self._jobs.cancel_peer(worker_id)

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        lane = self._lane if offer.owner in self._peers else None
        return self._jobs.start(lane, offer, take, into, deadline_s)

    def poll(self) -> list[Done]:
        return self._jobs.poll()

    def cancel(self, ticket: int) -> None:
        self._jobs.cancel(ticket)

    def close(self) -> None:
        self._jobs.close()
        self._peers.clear()

    def _copy(self, job: Job) -> None:
        peer = self._peers.get(job.offer.owner)
        if peer is None:
            raise PeerError(f"worker {job.offer.owner} is gone")
        if not peer.board.is_open(job.offer.move_id):
            raise PeerError(WITHDRAWN)
        flying: deque[torch.cuda.Event] = deque()
        with torch.cuda.device(self._view.device), torch.cuda.stream(self._stream):
            try:
                at, size = 0, FIRST_BYTES
                while at < len(job.pages):
                    job.left_s()
                    end = min(at + max(1, size // self._layout.page_bytes), len(job.pages))
                    flying.append(self._launch(peer.words, job.block(len(peer.words), at, end)))
                    job.n_bytes += (end - at) * self._layout.page_bytes
                    at, size = end, min(2 * size, MOST_BYTES)
                    if len(flying) > AHEAD:
                        flying.popleft().synchronize()
            finally:  # no deadline here: as long as the device may write pages, they are nobody else's
                while flying:
                    flying.popleft().synchronize()
        if not peer.board.is_open(job.offer.move_id):
            raise PeerError(WITHDRAWN)

    def _launch(self, source: Tensor, numbers: np.ndarray) -> torch.cuda.Event:
        """Let the device copy pages, ``numbers`` int32 [2, n] (theirs, own): with one kernel where both pools are on it. The event says when
        it has."""
        if source.device == self._words.device:
            # from page-locked memory: otherwise the host would wait for this copy, and so for all launches before it
            theirs, own = torch.from_numpy(numbers).pin_memory().to(self._view.device, non_blocking=True)
            self._copy_pages(source, self._words, theirs, own)
        else:
            for page, into in numbers.T.tolist():
                self._words[into].copy_(source[page], non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # the thread sleeps until the device wakes it
        done.record(self._stream)
        return done

    def _bytes_of(self, page: int) -> np.ndarray:
        with torch.cuda.stream(self._stream):
            return self._view[page].cpu().numpy()


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
