#!/bin/sh
# Builds the kernels and the programs here without Python, once per sanitizer, and runs them.
#
# usage: tests/native/sanitize.sh [address,undefined | thread | none]...
# With PART=n every n-th case only.
# For another CPU: CXX=aarch64-linux-gnu-g++ RUN="qemu-aarch64 -L /usr/aarch64-linux-gnu" … none
set -eu
cd "$(dirname "$0")/../.."
csrc=src/fastlstm/csrc
CXX=${CXX:-g++}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
[ $# -gt 0 ] || set -- address,undefined thread

# As in CMakeLists.txt.
avx2="-mavx2 -mfma"
avx_vnni="$avx2 -mavxvnni"
avx512="$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq"
avx512_vnni="$avx512 -mavx512vnni"
avx512_bf16="$avx512_vnni -mavx512bf16"
amx_bf16="$avx512_bf16 -mamx-tile -mamx-bf16 -mamx-int8"

isas=
definitions=
neon=
neon_dotprod="-march=armv8.2-a+dotprod"
neon_bf16="-march=armv8.2-a+dotprod+i8mm+bf16"
case $($CXX -dumpmachine) in
aarch64*) sets="neon neon_dotprod neon_bf16" ;;
*)
  sets="avx2 avx_vnni avx512 avx512_vnni avx512_bf16 amx_bf16"
  if ! grep -qsw avx_vnni /proc/cpuinfo && grep -qsw avx512_vnni /proc/cpuinfo; then
    # The instruction of AVX-VNNI in AVX-512's encoding, in code that is otherwise for AVX2.
    avx_vnni="$avx512_vnni -D_mm256_dpbusd_avx_epi32=_mm256_dpbusd_epi32 -D__AVXVNNI__=1"
    for macro in F BW VL DQ VNNI CD; do avx_vnni="$avx_vnni -U__AVX512${macro}__"; done
    definitions=-DFASTLSTM_RUNS_AVX_VNNI
  fi
  ;;
esac
for isa in $sets; do
  eval "flags=\$$isa"
  if $CXX $flags -x c++ -c /dev/null -o "$folder/probe.o" 2>"$folder/probe.txt"; then
    isas="$isas $isa"
    definitions="$definitions -DFASTLSTM_HAS_$(echo $isa | tr a-z A-Z)=1"
  fi
done

for sanitizer; do
  common="-std=c++20 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Wno-psabi -ffp-contract=fast"
  [ "$sanitizer" = none ] || common="$common -fsanitize=$sanitizer"
  case $sanitizer in *undefined*) common="$common -fno-sanitize-recover=all" ;; esac
  rm -f "$folder"/*.o
  for source in threads crowding dispatch features decode_dispatch kernels_scalar; do
    $CXX $common $definitions -I$csrc -c "$csrc/cpu/$source.cpp" -o "$folder/$source.o"
  done
  for source in decode_stream windows job_queue text_keys; do
    $CXX $common -I$csrc -c "$csrc/$source.cpp" -o "$folder/$source.o"
  done
  for isa in $isas; do
    eval "flags=\$$isa"
    $CXX $common $flags -I$csrc -c "$csrc/cpu/kernels_$isa.cpp" -o "$folder/kernels_$isa.o"
  done
  echo "-fsanitize=$sanitizer:"
  for program in sanitize sanitize_decode sanitize_windows; do
    $CXX $common $definitions -I$csrc "tests/native/$program.cpp" "$folder"/*.o -o "$folder/$program" -pthread -ldl
    TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1} ${RUN:-} "$folder/$program" "${PART:-1}"
  done
done
