#include "cpu/features.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace fastlstm {
namespace {

// Register state the operating system must save, as bits of XCR0.
constexpr uint64_t kStateAvx = 0x6;                  // XMM, YMM
constexpr uint64_t kStateAvx512 = kStateAvx | 0xe0;  // opmask, upper ZMM0-15, ZMM16-31
constexpr uint64_t kStateAmx = 0x60000;              // XTILECFG, XTILEDATA

// Of Linux on aarch64: HWCAP_ASIMD, HWCAP_ASIMDDP; HWCAP2_I8MM, HWCAP2_BF16.
constexpr uint64_t kHwcapNeon = 1 << 1, kHwcapDotprod = 1 << 20;
constexpr uint64_t kHwcap2I8mm = 1 << 13, kHwcap2Bf16 = 1 << 14;

constexpr bool bit(uint32_t value, int index) { return (value >> index) & 1u; }
constexpr bool has_all(uint64_t value, uint64_t mask) { return (value & mask) == mask; }

#if defined(__x86_64__)
struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
  return r;
}

// XGETBV by hand: the intrinsic would need -mxsave for this file.
uint64_t read_xcr0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

std::string read_model() {
  if (cpuid(0x80000000u, 0).eax < 0x80000004u) return "";
  std::array<char, 49> text{};
  for (uint32_t part = 0; part < 3; ++part) {
    const Registers r = cpuid(0x80000002u + part, 0);
    std::memcpy(text.data() + 16 * part, &r, 16);
  }
  std::string model(text.data());
  const auto first = model.find_first_not_of(' ');
  const auto last = model.find_last_not_of(' ');
  return first == std::string::npos ? "" : model.substr(first, last - first + 1);
}

std::string read_vendor(const Registers& r) {
  std::array<char, 13> text{};
  std::memcpy(text.data(), &r.ebx, 4);
  std::memcpy(text.data() + 4, &r.edx, 4);
  std::memcpy(text.data() + 8, &r.ecx, 4);
  return text.data();
}

bool request_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  constexpr long kXtileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kXtileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

CpuidRecord record_cpuid() {
  CpuidRecord record;
#if defined(__x86_64__)
  const Registers leaf0 = cpuid(0, 0);
  record.max_leaf = leaf0.eax;
  record.vendor = read_vendor(leaf0);
  record.model = read_model();
  record.leaf1_ecx = cpuid(1, 0).ecx;
  if (record.max_leaf >= 7) {
    const Registers leaf7 = cpuid(7, 0);
    record.leaf7_ebx = leaf7.ebx;
    record.leaf7_ecx = leaf7.ecx;
    record.leaf7_edx = leaf7.edx;
    if (leaf7.eax >= 1) record.leaf7_1_eax = cpuid(7, 1).eax;
  }
  if (bit(record.leaf1_ecx, 27)) record.xcr0 = read_xcr0();
  if (bit(record.leaf7_edx, 24) && has_all(record.xcr0, kStateAmx)) {
    record.is_amx_permitted = request_amx();
  }
#elif defined(__aarch64__) && defined(__linux__)
  record.hwcap = getauxval(AT_HWCAP);
  record.hwcap2 = getauxval(AT_HWCAP2);
#elif defined(__aarch64__) && defined(__APPLE__)
  record.hwcap = kHwcapNeon | kHwcapDotprod;  // parts of every such CPU
  const auto has = [](const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  if (has("hw.optional.arm.FEAT_I8MM")) record.hwcap2 |= kHwcap2I8mm;
  if (has("hw.optional.arm.FEAT_BF16")) record.hwcap2 |= kHwcap2Bf16;
#endif
  return record;
}

std::vector<std::string> usable_features(const CpuidRecord& r) {
  const bool is_xsave_on = bit(r.leaf1_ecx, 27);
  const bool is_avx_on = is_xsave_on && has_all(r.xcr0, kStateAvx);
  const bool is_avx512_on = is_xsave_on && has_all(r.xcr0, kStateAvx512) && bit(r.leaf7_ebx, 16);
  const bool is_amx_on =
      is_xsave_on && has_all(r.xcr0, kStateAmx) && r.is_amx_permitted && bit(r.leaf7_edx, 24);
  const std::array<std::pair<const char*, bool>, 19> table{{
      {"avx", is_avx_on && bit(r.leaf1_ecx, 28)},
      {"fma", is_avx_on && bit(r.leaf1_ecx, 12)},
      {"f16c", is_avx_on && bit(r.leaf1_ecx, 29)},
      {"avx2", is_avx_on && bit(r.leaf7_ebx, 5)},
      {"avx_vnni", is_avx_on && bit(r.leaf7_1_eax, 4)},
      {"avx512f", is_avx512_on},
      {"avx512bw", is_avx512_on && bit(r.leaf7_ebx, 30)},
      {"avx512vl", is_avx512_on && bit(r.leaf7_ebx, 31)},
      {"avx512dq", is_avx512_on && bit(r.leaf7_ebx, 17)},
      {"avx512_vnni", is_avx512_on && bit(r.leaf7_ecx, 11)},
      {"avx512_bf16", is_avx512_on && bit(r.leaf7_1_eax, 5)},
      {"avx512_fp16", is_avx512_on && bit(r.leaf7_edx, 23)},
      {"amx_tile", is_amx_on},
      {"amx_bf16", is_amx_on && bit(r.leaf7_edx, 22)},
      {"amx_int8", is_amx_on && bit(r.leaf7_edx, 25)},
      {"neon", has_all(r.hwcap, kHwcapNeon)},
      {"neon_dotprod", has_all(r.hwcap, kHwcapDotprod)},
      {"neon_i8mm", has_all(r.hwcap2, kHwcap2I8mm)},
      {"neon_bf16", has_all(r.hwcap2, kHwcap2Bf16)},
  }};
  std::vector<std::string> names;
  for (const auto& [name, is_usable] : table) {
    if (is_usable) names.emplace_back(name);
  }
  return names;
}

std::string choose_isa(const CpuidRecord& record) {
  const std::vector<std::string> features = usable_features(record);
  const auto has = [&](const char* name) {
    return std::find(features.begin(), features.end(), name) != features.end();
  };
  if (has("neon")) {
    return has("neon_dotprod") && has("neon_i8mm") && has("neon_bf16") ? "neon_bf16" : "neon";
  }
  if (!has("avx2") || !has("fma")) return "scalar";
  if (!has("avx512f") || !has("avx512bw") || !has("avx512vl") || !has("avx512dq")) return "avx2";
  if (!has("avx512_bf16") || !has("avx512_vnni")) return "avx512";
  return has("amx_bf16") && has("amx_int8") ? "amx_bf16" : "avx512_bf16";
}

}  // namespace fastlstm
