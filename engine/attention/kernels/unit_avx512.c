/* The kernels for avx512; the build compiles this file with that instruction set's flags. */
#define UNIT qe_unit_avx512
#define UNIT_NAME "avx512"
#include "unit.h"
