// Multi-tensor apply with gradients that are multiplied by a factor (factor.cuh). A set of hyperparameters has one more
// number, behind the rule's: the bits of the address of the factor. A kernel gets the factor there in its place.

// A rule whose gradient is multiplied by its last uniform, and not rounded in between.
template <class Rule> struct Scaled : Rule {
    static constexpr int uniforms = Rule::uniforms + 1;
    template <class S, class... T> static __device__ __forceinline__ void apply(const S* in, const S* u, S* out) {
        S scaled[Rule::lists];
#pragma unroll
        for (int i = 0; i < Rule::lists; ++i)
            if ((Rule::reads >> i) & 1) scaled[i] = i == 1 ? in[i] * u[Rule::uniforms] : in[i];
        Rule::template apply<S, T...>(scaled, u, out);
    }
};

// A table for such rules, whose kernels find this `fetch` by its type. It is an argument like the table itself.
template <class Table> struct Factored : Table {};

template <int STRIDE, class S, int LISTS, int UNIFORMS, class Table>
__device__ __forceinline__ long long fetch(
    Work<S, LISTS, UNIFORMS>& work, const Factored<Table>& table, long long item, int lane) {
    const Factor& factor = *(const Factor*)table.data()[UNIFORMS - 1];  // of the first set; all have the same
    const long long set = fetch<STRIDE>(work, (const Table&)table, item, lane);
    if (lane == (UNIFORMS - 1) % 32) work.u[UNIFORMS - 1] = (S)(factor.coefficient / (double)factor.scale);
    if (lane == 0 && factor.leaves_out()) work.left = 0;  // no element is loaded or stored
    return set;
}
