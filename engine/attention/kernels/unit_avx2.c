/* The kernels for avx2; the build compiles this file with that instruction set's flags. */
#define UNIT qe_unit_avx2
#define UNIT_NAME "avx2"
#include "unit.h"
