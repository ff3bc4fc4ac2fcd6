"""fastlstm's native code: what this machine can do, and how fast it does it."""

class CpuidRecord:
    """What CPUID, XGETBV and the kernel said (csrc/cpu/features.h); tests invent their own."""

    max_leaf: int
    leaf1_ecx: int
    leaf7_ebx: int
    leaf7_ecx: int
    leaf7_edx: int
    leaf7_1_eax: int
    xcr0: int
    hwcap: int
    hwcap2: int
    is_amx_permitted: bool
    vendor: str
    model: str
    def __init__(self) -> None: ...

def record_cpuid() -> CpuidRecord: ...
def usable_features(record: CpuidRecord) -> list[str]: ...
def choose_isa(record: CpuidRecord) -> str: ...
def peak_gflops(isa: str, threads: int, seconds: float = 0.2) -> dict[str, float]:
    """GFLOP/s of register-tile loops for `isa` and every narrower set, keyed by set."""

def keep_freed_memory() -> bool:
    """Keeps freed memory in the process; False where the C library cannot (no glibc)."""

def copy_gb_s(threads: int, bytes_per_thread: int, rounds: int = 5) -> float:
    """GB/s, read plus written, of memcpy on all threads at once."""

class Kernels:
    """The LSTM kernels of one instruction set; addresses as csrc/lstm.h says, 0 for null."""

    @property
    def isa(self) -> str: ...
    @property
    def is_bf16(self) -> bool: ...
    @property
    def lanes(self) -> int: ...
    def splits_lanes(self, B: int, H: int, threads: int, has_norm: bool) -> bool: ...
    @staticmethod
    def gate_rows(T: int, B: int) -> int: ...
    def forward_bytes(self, I: int, H: int) -> int: ...
    def backward_bytes(self, I: int, H: int) -> int: ...
    def pack(self, threads: int, is_backward: bool, *sizes_and_addresses: int) -> None: ...
    def forward(self, threads: int, members: int, *calls: tuple[int, ...]) -> None:
        """Runs calls side by side, on `members` threads each, if the team has so many."""

    def reads_unpacked(self, T: int, B: int, I: int, H: int) -> bool: ...
    def backward(self, threads: int, members: int, *calls: tuple[int, ...]) -> None: ...

class Fingerprint:
    """Sums of memory (csrc/fingerprint.h), each region by address and bytes."""

    def __init__(self, kernels: Kernels, regions: list[tuple[int, int]], threads: int) -> None: ...
    def is_still(self, threads: int) -> bool: ...

def lstm_kernels(isa: str, is_bf16: bool) -> Kernels: ...
def use_openmp(library: str) -> bool:
    """Runs teams on this OpenMP runtime, which must be loaded; False where it cannot be used."""
