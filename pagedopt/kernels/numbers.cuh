// Element types of lists, and the functions that rules call. 16-bit floats are stored as bits; arithmetic is in S.

struct half_bits { unsigned short bits; };
struct bfloat16_bits { unsigned short bits; };

template <class S, class T> __device__ __forceinline__ S load_as(T value) { return S(value); }

template <> __device__ __forceinline__ float load_as<float, bfloat16_bits>(bfloat16_bits value) {
    return __uint_as_float((unsigned)value.bits << 16);
}
template <> __device__ __forceinline__ double load_as<double, bfloat16_bits>(bfloat16_bits value) {
    return (double)load_as<float>(value);
}
template <> __device__ __forceinline__ float load_as<float, half_bits>(half_bits value) {
    return half_to_float(value.bits);
}
template <> __device__ __forceinline__ double load_as<double, half_bits>(half_bits value) {
    return (double)half_to_float(value.bits);
}

// Round to nearest, ties to even, as torch does; a double is converted to 16 bits via float, also as torch does.
template <class T, class S> __device__ __forceinline__ T store_as(S value) { return T(value); }

__device__ __forceinline__ bfloat16_bits to_bfloat16(float value) {
#ifdef CONVERTS_TO_BFLOAT16
    return {float_to_bfloat16(value)};
#else
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN
    return {(unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}
template <> __device__ __forceinline__ bfloat16_bits store_as<bfloat16_bits, float>(float value) {
    return to_bfloat16(value);
}
template <> __device__ __forceinline__ bfloat16_bits store_as<bfloat16_bits, double>(double value) {
    return to_bfloat16((float)value);
}
template <> __device__ __forceinline__ half_bits store_as<half_bits, float>(float value) {
    return {float_to_half(value)};
}
template <> __device__ __forceinline__ half_bits store_as<half_bits, double>(double value) {
    return {float_to_half((float)value)};
}

// A number as list LIST of the types T stores it: of two rules in one kernel, the second takes what the first has stored.
template <int LIST, class S, class T, class... Rest> __device__ __forceinline__ S stored(S x) {
    if constexpr (LIST == 0) return load_as<S, T>(store_as<T, S>(x));
    else return stored<LIST - 1, S, Rest...>(x);
}

// min and max propagate NaN, as torch.minimum and torch.maximum do.
template <class S> __device__ __forceinline__ S element_max(S a, S b) { return (a > b || a != a) ? a : b; }
template <class S> __device__ __forceinline__ S element_min(S a, S b) { return (a < b || a != a) ? a : b; }
template <class S> __device__ __forceinline__ S element_sign(S x) { return S((x > S(0)) - (x < S(0))); }
template <class S> __device__ __forceinline__ S element_abs(S x) { return fabs(x); }
template <class S> __device__ __forceinline__ S element_sqrt(S x) { return sqrt(x); }
template <class S> __device__ __forceinline__ S element_exp(S x) { return exp(x); }
template <class S> __device__ __forceinline__ S element_log(S x) { return log(x); }
template <class S> __device__ __forceinline__ S element_tanh(S x) { return tanh(x); }
template <class S> __device__ __forceinline__ S element_fma(S a, S b, S c) { return fma(a, b, c); }
