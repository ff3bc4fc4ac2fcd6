// Which instruction sets this process may use: the CPU must have them (CPUID), the operating system
// must save their registers (XGETBV), and for AMX the process must have been given permission
// (arch_prctl).
//
// Reading the machine and deciding are apart: `record_cpuid` reads, the other functions decide on
// any record, so that a test can ask what would run on a CPU that is not here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastlstm {

// What CPUID, XGETBV and the kernel said; on aarch64 only `hwcap`s. What is unknown is zero.
struct CpuidRecord {
  uint32_t max_leaf = 0;          // CPUID.0:EAX
  uint32_t leaf1_ecx = 0;         // CPUID.1:ECX
  uint32_t leaf7_ebx = 0;         // CPUID.(7,0):EBX
  uint32_t leaf7_ecx = 0;         // CPUID.(7,0):ECX
  uint32_t leaf7_edx = 0;         // CPUID.(7,0):EDX
  uint32_t leaf7_1_eax = 0;       // CPUID.(7,1):EAX
  uint64_t xcr0 = 0;              // XGETBV(0); 0 when OSXSAVE is off
  bool is_amx_permitted = false;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) succeeded
  uint64_t hwcap = 0;             // aarch64: getauxval(AT_HWCAP)
  uint64_t hwcap2 = 0;            // aarch64: getauxval(AT_HWCAP2)
  std::string vendor;             // "GenuineIntel", "AuthenticAMD" ...
  std::string model;              // the brand string, trimmed
};

// Reads this machine. Asks Linux for permission to use AMX tiles where the CPU has them: the
// question cannot be answered without asking. The permission belongs to the process and harms
// nothing.
CpuidRecord record_cpuid();

// Names of the usable features, in a fixed order: avx, fma, f16c, avx2, avx_vnni, avx512f,
// avx512bw, avx512vl, avx512dq, avx512_vnni, avx512_bf16, avx512_fp16, amx_tile, amx_bf16,
// amx_int8, neon, neon_dotprod, neon_i8mm, neon_bf16. A feature that the CPU has and the operating
// system does not enable is absent.
std::vector<std::string> usable_features(const CpuidRecord& record);

// The widest instruction set the kernels may use: "scalar", "avx2" (AVX2+FMA), "avx512"
// (F+BW+VL+DQ), "avx512_bf16" (with VNNI), "amx_bf16" (with int8); on aarch64 "neon", "neon_bf16"
// (with dotprod and I8MM). Each includes all before it.
std::string choose_isa(const CpuidRecord& record);

}  // namespace fastlstm
