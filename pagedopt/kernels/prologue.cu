// The kernel before that of a rule. It reads hyperparameters and step counts from memory, computes the rule's uniforms
// in double, and writes them into a table. One thread per row; each row has a set of its own.

constexpr int BLOCK = 128;

// What a rule may call, on doubles, as Python computes it. Where Python raises, the result is infinity or NaN.
namespace python {
// An int has no negative zero. Not x + 0.0: g++ 12 drops that where x is minus a truth value.
__device__ inline double whole(double x) { return x == 0 ? 0.0 : x; }

__device__ inline double power(double a, double b) { return ::pow(a, b); }

// The remainder has the sign of b.
__device__ inline double modulo(double a, double b) {
    const double rest = ::fmod(a, b);
    if (rest == 0) return ::copysign(0.0, b);
    return (rest < 0) != (b < 0) ? rest + b : rest;
}

// In the order of operations of float_floor_div in CPython's floatobject.c.
__device__ inline double floor_divide(double a, double b) {
    double rest = ::fmod(a, b), quotient = (a - rest) / b;
    if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1.0;
    if (quotient == 0) return ::copysign(0.0, a / b);
    const double whole = ::floor(quotient);
    return quotient - whole > 0.5 ? whole + 1.0 : whole;
}

// Of two that are equal the first; every comparison with NaN is false.
__device__ inline double min(double a, double b) { return b < a ? b : a; }
__device__ inline double max(double a, double b) { return b > a ? b : a; }
__device__ inline double sign(double x) { return double((x > 0) - (x < 0)); }
__device__ inline double abs(double x) { return ::fabs(x); }
__device__ inline double sqrt(double x) { return ::sqrt(x); }
__device__ inline double exp(double x) { return ::exp(x); }
__device__ inline double log(double x) { return ::log(x); }
__device__ inline double tanh(double x) { return ::tanh(x); }
__device__ inline double fma(double a, double b, double c) { return a * b + c; }  // rounds twice
}  // namespace python

struct PrologueAt {
    word* table;         // begins with the sets
    const word* inputs;  // for each row: 0 if it takes no step, else 1 and the seed in the upper half; the address of its
                         // step count; that of each hyperparameter
    long long rows;
    long long stride;   // words of a set
    long long seed_at;  // index of the seed in a set; -1: there is none
    const Factor* factor;  // of gradients; null: there is none
};

// The lowest bit of an address is 1 for a float32, and 0 for a float64.
__device__ inline double number_at(word address) {
    return address & 1 ? (double)*(const float*)(address - 1) : *(const double*)address;
}

__device__ inline void store_number(word address, double value) {
    if (address & 1) *(float*)(address - 1) = (float)value;
    else *(double*)address = value;
}

// A number that is written (a step count, a carried number) must belong to one row of the launch alone.
template <class Rule> __global__ void __launch_bounds__(BLOCK) prologue(const __grid_constant__ PrologueAt at) {
    const long long row = (long long)blockIdx.x * BLOCK + threadIdx.x;
    if (row >= at.rows) return;
    if (at.factor && at.factor->leaves_out()) return;  // the step is not taken
    const word* input = at.inputs + row * (2 + Rule::scalars);
    if (input[0] == 0) return;
    const word count = input[1];  // 0: steps are not counted
    const double step = count ? number_at(count) + 1 : 0;
    double h[Rule::scalars + 1], u[Rule::uniforms + 1];  // C++ has no empty arrays
    for (int i = 0; i < Rule::scalars; ++i) h[i] = i == Rule::step_at ? step : number_at(input[2 + i]);
    Rule::compute(h, u);
    double* set = (double*)at.table + row * at.stride;
    for (int i = 0; i < Rule::uniforms; ++i) set[i] = u[i];
    if (at.seed_at >= 0) set[at.seed_at] = (double)(input[0] >> 32) * 4294967296.0 + step;
    if (count) store_number(count, step);
    for (int k = 0; k < Rule::carried; ++k) store_number(input[2 + Rule::carried_scalar(k)], u[Rule::carried_uniform(k)]);
}
