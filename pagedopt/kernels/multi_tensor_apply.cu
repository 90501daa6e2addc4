// One launch over one pointer list: each group of THREADS threads (a warp or the block) takes one chunk of one tensor,
// follows its row to the addresses, and applies the rule to every element. Algorithm: chunked multi-tensor apply, as in
// NVIDIA apex (csrc/multi_tensor_apply.cuh) and PyTorch (aten/src/ATen/native/cuda/MultiTensorApply.cuh).

constexpr int BLOCK = 512;

template <class T, int WIDTH> struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Pack {
    T value[WIDTH];
};

template <class S, class Rule, int LIST, int WIDTH, class T>
__device__ __forceinline__ void load(S (&in)[WIDTH][Rule::lists], word address, long long at) {
    if constexpr ((Rule::reads >> LIST) & 1) {
        const Pack<T, WIDTH> pack = *(const Pack<T, WIDTH>*)((const T*)address + at);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) in[i][LIST] = load_as<S, T>(pack.value[i]);
    }
}

template <class S, class Rule, int LIST, int WIDTH, class T>
__device__ __forceinline__ void store(const S (&out)[WIDTH][Rule::outputs], word address, long long at) {
    if constexpr ((Rule::writes >> LIST) & 1) {
        Pack<T, WIDTH> pack;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) pack.value[i] = store_as<T, S>(out[i][Rule::output_of(LIST)]);
        *(Pack<T, WIDTH>*)((T*)address + at) = pack;
    }
}

template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Indices<I...> type; };

template <class S, class Rule, int WIDTH, class... T, int... LIST>
__device__ __forceinline__ void update(const word* address, const S* u, long long at, Indices<LIST...>) {
    S in[WIDTH][Rule::lists], out[WIDTH][Rule::outputs];
    (load<S, Rule, LIST, WIDTH, T>(in, address[LIST], at), ...);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) Rule::template apply<S>(in[i], u, out[i]);
    (store<S, Rule, LIST, WIDTH, T>(out, address[LIST], at), ...);
}

template <class S, class Rule, int THREADS, class Table, class... T>
__global__ void __launch_bounds__(BLOCK) multi_tensor_apply(const __grid_constant__ Table table) {
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;
    const int lane = threadIdx.x % THREADS;
    const word* words = table.data();
    const Chunk chunk = ((const Chunk*)(words + table.header.chunks))[item];
    const Row<Rule::lists>& row = ((const Row<Rule::lists>*)(words + table.header.rows))[chunk.row];
    const long long left = row.numel - chunk.offset;
    if (left <= 0) return;  // an absent tensor: its row says 0 elements
    const int numel = (int)(left < table.header.chunk_numel ? left : table.header.chunk_numel);

    S u[Rule::uniforms ? Rule::uniforms : 1];
#pragma unroll
    for (int i = 0; i < Rule::uniforms; ++i) u[i] = (S)((const double*)words)[row.set * Rule::uniforms + i];
    word address[Rule::lists];
#pragma unroll
    for (int i = 0; i < Rule::lists; ++i) address[i] = row.address[i];

    // The widest access is 16 bytes of the narrowest type; every list must be aligned for its share of it.
    constexpr int narrow = []() constexpr { int s = 8; ((s = sizeof(T) < s ? sizeof(T) : s), ...); return s; }();
    constexpr int WIDTH = 16 / narrow;
    typedef typename Count<sizeof...(T)>::type Lists;
    unsigned misaligned = 0;
    {
        int i = 0;
        ((misaligned |= (unsigned)(address[i++] % alignof(Pack<T, WIDTH>))), ...);
    }
    int done = 0;
    if (!misaligned) {
        done = numel - numel % WIDTH;
        for (int i = lane * WIDTH; i < done; i += THREADS * WIDTH)
            update<S, Rule, WIDTH, T...>(address, u, chunk.offset + i, Lists());
    }
    for (int i = done + lane; i < numel; i += THREADS)
        update<S, Rule, 1, T...>(address, u, chunk.offset + i, Lists());
}
