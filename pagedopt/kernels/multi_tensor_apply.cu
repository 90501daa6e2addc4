// One launch over one pointer list: each group of THREADS threads (a warp or the block) takes one chunk of one tensor,
// follows its row to the addresses, and applies the rule to every element. Algorithm: chunked multi-tensor apply, as in
// NVIDIA apex (csrc/multi_tensor_apply.cuh) and PyTorch (aten/src/ATen/native/cuda/MultiTensorApply.cuh).

constexpr int BLOCK = 512;

template <class T, int WIDTH> struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Pack {
    T value[WIDTH];
};

// WIDTH elements, STRIDE apart: neighbours in one access, others one by one, all of them on their way at once.
template <class S, class Rule, int LIST, int WIDTH, int STRIDE, class T>
__device__ __forceinline__ void load(S (&in)[WIDTH][Rule::lists], word address, long long at) {
    if constexpr (!((Rule::reads >> LIST) & 1)) return;
    else if constexpr (STRIDE > 1) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) in[i][LIST] = load_as<S, T>(((const T*)address)[at + i * STRIDE]);
    } else {
        const Pack<T, WIDTH> pack = *(const Pack<T, WIDTH>*)((const T*)address + at);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) in[i][LIST] = load_as<S, T>(pack.value[i]);
    }
}

template <class S, class Rule, int LIST, int WIDTH, int STRIDE, class T>
__device__ __forceinline__ void store(const S (&out)[WIDTH][Rule::outputs], word address, long long at) {
    if constexpr (!((Rule::writes >> LIST) & 1)) return;
    else if constexpr (STRIDE > 1) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            ((T*)address)[at + i * STRIDE] = store_as<T, S>(out[i][Rule::output_of(LIST)]);
    } else {
        Pack<T, WIDTH> pack;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) pack.value[i] = store_as<T, S>(out[i][Rule::output_of(LIST)]);
        *(Pack<T, WIDTH>*)((T*)address + at) = pack;
    }
}

template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Indices<I...> type; };

template <class S, class Rule, int WIDTH, int STRIDE, class... T, int... LIST>
__device__ __forceinline__ void update(const word* address, const S* u, long long at, Indices<LIST...>) {
    S in[WIDTH][Rule::lists], out[WIDTH][Rule::outputs];
    (load<S, Rule, LIST, WIDTH, STRIDE, T>(in, address[LIST], at), ...);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) Rule::template apply<S>(in[i], u, out[i]);
    (store<S, Rule, LIST, WIDTH, STRIDE, T>(out, address[LIST], at), ...);
}

// What a group of threads must know of its chunk. One warp fetches it, each word once: a table in host memory answers
// over the link, where every request counts.
template <class S, int LISTS, int UNIFORMS> struct Work {
    word address[LISTS];
    long long offset;
    int numel;
    S u[UNIFORMS ? UNIFORMS : 1];
};

// A set of hyperparameters has STRIDE numbers, of which the rule takes the first UNIFORMS.
template <int STRIDE, class S, int LISTS, int UNIFORMS, class Table>
__device__ __forceinline__ long long fetch(
    Work<S, LISTS, UNIFORMS>& work, const Table& table, long long item, int lane) {
    const word* words = table.data();
    const Chunk chunk = chunk_of(table, item);
    const word* row = words + table.header.rows + chunk.row * (LISTS + 2);
    const long long left = (long long)row[LISTS] - chunk.offset;  // an absent tensor has 0 elements
    const long long set = (long long)row[LISTS + 1];
    for (int i = lane; i < LISTS; i += 32) work.address[i] = row[i];
    // Most tables have one set: it is on its way before the row says so.
    const double* scalars = (const double*)words;
    for (int i = lane; i < UNIFORMS; i += 32) work.u[i] = (S)scalars[i];
    if (set)
        for (int i = lane; i < UNIFORMS; i += 32) work.u[i] = (S)scalars[set * STRIDE + i];
    if (lane == 0) {
        work.offset = chunk.offset;
        work.numel = left <= 0 ? 0 : (int)(left < table.header.chunk_numel ? left : table.header.chunk_numel);
    }
    return set;
}

// One chunk by one group of threads, which have all come here with the same item.
template <class S, class Rule, int THREADS, class Table, class... T>
__device__ __forceinline__ void apply_chunk(
    Work<S, Rule::lists, Rule::uniforms>& work, const Table& table, long long item, int lane) {
    if (lane < 32) fetch<Rule::uniforms>(work, table, item, lane);
    if constexpr (THREADS > 32) __syncthreads();
    else __syncwarp();

    // The widest type is accessed 16 bytes at a time; every list must be aligned for its share of that.
    constexpr int widest = []() constexpr { int s = 1; ((s = sizeof(T) > s ? sizeof(T) : s), ...); return s; }();
    constexpr int WIDTH = 16 / widest;
    typedef typename Count<sizeof...(T)>::type Lists;
    const int numel = work.numel;
    const long long offset = work.offset;
    word address[Rule::lists];
    S u[Rule::uniforms ? Rule::uniforms : 1];
#pragma unroll
    for (int i = 0; i < Rule::lists; ++i) address[i] = work.address[i];
#pragma unroll
    for (int i = 0; i < Rule::uniforms; ++i) u[i] = work.u[i];
    unsigned misaligned = 0;
    {
        int i = 0;
        ((misaligned |= (unsigned)(address[i++] % alignof(Pack<T, WIDTH>))), ...);
    }
    const int done = misaligned ? 0 : numel - numel % WIDTH;
    for (int i = lane * WIDTH; i < done; i += THREADS * WIDTH)
        update<S, Rule, WIDTH, 1, T...>(address, u, offset + i, Lists());
    int i = done + lane;  // a thread that waited for one element at a time would leave half of the memory's rate
    for (; i + (WIDTH - 1) * THREADS < numel; i += WIDTH * THREADS)
        update<S, Rule, WIDTH, THREADS, T...>(address, u, offset + i, Lists());
    for (; i < numel; i += THREADS) update<S, Rule, 1, 1, T...>(address, u, offset + i, Lists());
}

template <class S, class Rule, int THREADS, class Table, class... T>
__global__ void __launch_bounds__(BLOCK, 2) multi_tensor_apply(const __grid_constant__ Table table) {
    __shared__ Work<S, Rule::lists, Rule::uniforms> works[BLOCK / THREADS];
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;  // whole groups leave together
    apply_chunk<S, Rule, THREADS, Table, T...>(works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
}

// The same on a grid of any size: a few blocks nearly fill the link to the host and leave the rest of the GPU to others.
template <class S, class Rule, int THREADS, class Table, class... T>
__global__ void __launch_bounds__(BLOCK, 2) multi_tensor_apply_small_grid(const __grid_constant__ Table table) {
    __shared__ Work<S, Rule::lists, Rule::uniforms> works[BLOCK / THREADS];
    const long long stride = (long long)gridDim.x * (BLOCK / THREADS);
    long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    for (; item < table.header.count; item += stride) {
        apply_chunk<S, Rule, THREADS, Table, T...>(works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
        if constexpr (THREADS > 32) __syncthreads();  // before the next chunk's fetch overwrites what this one reads
        else __syncwarp();
    }
}
