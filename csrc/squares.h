// The exact sum of squares of floats: a number in fixed point, whose digits are integers.
//
// meshplan/kernel/_digest.py is the definition. Digit i counts 2^(32 i - 2148). The square of the
// smallest float64 is 2^-2148 and that of the largest below 2^2048, so that 136 digits hold 2^60 of
// any squares.
#pragma once

#include "port.h"

namespace meshplan::squares {

constexpr i32 kDigits = 136, kDigitBits = 32, kPoint = 2148;

}  // namespace meshplan::squares
