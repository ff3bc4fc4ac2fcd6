#define FASTLSTM_ISA neon
#define FASTLSTM_LANES 4

#include "cpu/every_table.h"
