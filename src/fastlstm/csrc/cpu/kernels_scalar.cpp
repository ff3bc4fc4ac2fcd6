#define FASTLSTM_ISA scalar
#define FASTLSTM_LANES 8

#include "cpu/every_table.h"
