// The C interface of the CPU library. Plain C, nothing of torch or Python: any caller of any
// version can load it. Numbers, once given a meaning, keep it; MP_ABI_VERSION changes otherwise.
#pragma once
#define MP_ABI_VERSION 1
#define MP_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum mp_dtype {
  MP_FLOAT32, MP_FLOAT64, MP_FLOAT16, MP_BFLOAT16,
  MP_INT8, MP_INT16, MP_INT32, MP_INT64, MP_UINT8
};
enum mp_op { MP_SUM, MP_AVG, MP_MAX, MP_MIN, MP_PRODUCT };
enum mp_order { MP_TREE, MP_RANK };
enum mp_accumulate { MP_WIDE, MP_ACC_FLOAT64 };
enum mp_rounding { MP_ONCE, MP_NODE };
// MP_COMBINE writes partials of the dtype that `combine_leaves` of the contract returns, neither
// divided nor rounded for the last time; MP_FINISH takes them.
enum mp_part { MP_WHOLE, MP_COMBINE, MP_FINISH };
enum mp_error {
  MP_OK, MP_BAD_DTYPE, MP_BAD_OP, MP_BAD_CONTRACT, MP_BAD_PART, MP_BAD_SHAPE, MP_BAD_NUMEL,
  MP_BAD_DIVISOR, MP_NO_MEMORY
};

// Combine `leaves` in contract order into `out`, on the calling thread, which must keep subnormal
// numbers and round to nearest. Pointers need no alignment.
//   out      numel elements of `dtype`, with MP_COMBINE of the dtype of partials. It may be one of
//            the leaves if elements of both have one size; else it overlaps no leaf.
//   leaves   one pointer per coordinate, row-major over `sizes`: numel elements of `dtype`, with
//            MP_FINISH of the dtype of partials
//   sizes    of the axes, outermost first, each 1 or more; their product is the number of leaves
//   dtype    of the leaves of the whole reduction, in every part
//   divisor  0, except for MP_AVG in MP_WHOLE and MP_FINISH: 1 or more, what the sum is divided by
// Returns MP_OK, or an mp_error with nothing written.
MP_API int mp_fold(void* out, const void* const* leaves, const long long* sizes, int axes,
                   long long numel, int dtype, int op, int order, int accumulate, int rounding,
                   int part, long long divisor);

// MP_ABI_VERSION of the library.
MP_API int mp_abi_version(void);

// Compiler and flags, one line of text that lives as long as the library.
MP_API const char* mp_build_info(void);

#ifdef __cplusplus
}
#endif
