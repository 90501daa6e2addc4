// One launch over one pointer table: THREADS threads (a warp or the block) take one chunk of one tensor, read its row
// of addresses, and apply the rule to every element. Algorithm: chunked multi-tensor apply, as in
// NVIDIA apex (csrc/multi_tensor_apply.cuh) and PyTorch (aten/src/ATen/native/cuda/MultiTensorApply.cuh).

constexpr int BLOCK = 512;

template <class T, int WIDTH> struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Pack {
    T value[WIDTH];
};

// Load WIDTH consecutive elements: in one access, or one by one if the list's bit in `across` is set, which means that
// they are not aligned to a pack; all but the first then hit the cache.
template <class S, class Rule, int LIST, int WIDTH, class T>
__device__ __forceinline__ void load(S (&in)[WIDTH][Rule::lists], word address, long long at, unsigned across) {
    if constexpr ((Rule::reads >> LIST) & 1) {
        const T* from = (const T*)address + at;
        Pack<T, WIDTH> pack;
        if ((across >> LIST) & 1) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) pack.value[i] = from[i];
        } else pack = *(const Pack<T, WIDTH>*)from;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) in[i][LIST] = load_as<S, T>(pack.value[i]);
    }
}

template <class S, class Rule, int LIST, int WIDTH, class T>
__device__ __forceinline__ void store(
    const S (&out)[WIDTH][Rule::outputs], word address, long long at, unsigned across) {
    if constexpr ((Rule::writes >> LIST) & 1) {
        T* to = (T*)address + at;
        Pack<T, WIDTH> pack;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) pack.value[i] = store_as<T, S>(out[i][Rule::output_of(LIST)]);
        if ((across >> LIST) & 1) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) to[i] = pack.value[i];
        } else *(Pack<T, WIDTH>*)to = pack;
    }
}

template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Indices<I...> type; };

template <class S, class Rule, int WIDTH, class... T, int... LIST>
__device__ __forceinline__ void update(
    const word* address, const S* u, long long at, unsigned across, Indices<LIST...>) {
    S in[WIDTH][Rule::lists], out[WIDTH][Rule::outputs];
    (load<S, Rule, LIST, WIDTH, T>(in, address[LIST], at, across), ...);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) Rule::template apply<S, T...>(in[i], u, out[i]);
    (store<S, Rule, LIST, WIDTH, T>(out, address[LIST], at, across), ...);
}

// All that the threads of a chunk need to know. One warp fetches it, each word once: if the table is in host memory,
// every request crosses the link.
template <class S, int LISTS, int UNIFORMS> struct Work {
    word address[LISTS];
    long long offset;
    long long left;  // elements of the tensor from there on
    S u[UNIFORMS ? UNIFORMS : 1];
};

// A set of hyperparameters has STRIDE numbers; the rule takes the first UNIFORMS.
template <int STRIDE, class S, int LISTS, int UNIFORMS, class Table>
__device__ __forceinline__ long long fetch(
    Work<S, LISTS, UNIFORMS>& work, const Table& table, long long item, int lane) {
    const word* words = table.data();
    const Chunk chunk = chunk_of(table, item);
    const word* row = words + table.header.rows + chunk.row * (LISTS + 2);
    const long long left = (long long)row[LISTS] - chunk.offset;  // an absent tensor has 0 elements
    const long long set = (long long)row[LISTS + 1];
    for (int i = lane; i < LISTS; i += 32) work.address[i] = row[i];
    // Most tables have one set: request set 0 before the row has arrived.
    const double* scalars = (const double*)words;
    for (int i = lane; i < UNIFORMS; i += 32) work.u[i] = (S)scalars[i];
    if (set)
        for (int i = lane; i < UNIFORMS; i += 32) work.u[i] = (S)scalars[set * STRIDE + i];
    if (lane == 0) {
        work.offset = chunk.offset;
        work.left = left < 0 ? 0 : left;
    }
    return set;
}

constexpr int highest(unsigned bits) { return bits > 1 ? 1 + highest(bits >> 1) : 0; }

// One chunk, by one warp or block whose threads all have the same item.
template <class S, class Rule, int THREADS, class Table, class... T>
__device__ __forceinline__ void apply_chunk(
    Work<S, Rule::lists, Rule::uniforms>& work, const Table& table, long long item, int lane) {
    if (lane < 32) fetch<Rule::uniforms>(work, table, item, lane);
    if constexpr (THREADS > 32) __syncthreads();
    else __syncwarp();

    // The widest type is accessed 16 bytes at a time; packs of the other types have as many elements.
    constexpr int widest = []() constexpr { int s = 1; ((s = sizeof(T) > s ? sizeof(T) : s), ...); return s; }();
    constexpr int WIDTH = 16 / widest;
    typedef typename Count<sizeof...(T)>::type Lists;
    const long long offset = work.offset;
    word address[Rule::lists];
    S u[Rule::uniforms ? Rule::uniforms : 1];
#pragma unroll
    for (int i = 0; i < Rule::lists; ++i) address[i] = work.address[i];
#pragma unroll
    for (int i = 0; i < Rule::uniforms; ++i) u[i] = work.u[i];

    // Align packs to lines of the list that is written last, so that no two warps write to one sector. Elements before
    // the first line are the tensor's head; every chunk begins and ends later than listed, by the length of the head.
    constexpr int last = highest(Rule::writes);
    constexpr word LINE = THREADS > 32 ? 128 : 16;
    int begin = 0, i = 0;
    ((begin = i++ == last ? (int)(-address[last] % LINE / sizeof(T)) : begin), ...);
    const long long most = table.header.chunk_numel + begin;
    const int end = (int)(work.left < most ? work.left : most);
    begin = begin < end ? begin : end;
    const int done = begin + (end - begin) / WIDTH * WIDTH;
    unsigned across = 0;
    i = 0;
    ((across |= (unsigned)((address[i] + begin * sizeof(T)) % alignof(Pack<T, WIDTH>) != 0) << i, ++i), ...);

    // Head and tail first: later, their variables would take registers from the loop over packs.
    const int head = offset ? 0 : begin;
    for (i = lane; i < head + end - done; i += THREADS)
        update<S, Rule, 1, T...>(address, u, offset + (i < head ? i : i - head + done), 0u, Lists());
    if (across) {
        for (i = begin + lane * WIDTH; i < done; i += THREADS * WIDTH)
            update<S, Rule, WIDTH, T...>(address, u, offset + i, across, Lists());
    } else {
        for (i = begin + lane * WIDTH; i < done; i += THREADS * WIDTH)
            update<S, Rule, WIDTH, T...>(address, u, offset + i, 0u, Lists());
    }
}

template <class S, class Rule, int THREADS, class Table, class... T>
__global__ void __launch_bounds__(BLOCK, 2) multi_tensor_apply(const __grid_constant__ Table table) {
    __shared__ Work<S, Rule::lists, Rule::uniforms> works[BLOCK / THREADS];
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;  // all threads of a chunk return together
    apply_chunk<S, Rule, THREADS, Table, T...>(works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
}

// The same with a grid of any size: a few blocks nearly saturate the link to the host, and leave the GPU to others.
template <class S, class Rule, int THREADS, class Table, class... T>
__global__ void __launch_bounds__(BLOCK, 2) multi_tensor_apply_small_grid(const __grid_constant__ Table table) {
    __shared__ Work<S, Rule::lists, Rule::uniforms> works[BLOCK / THREADS];
    const long long stride = (long long)gridDim.x * (BLOCK / THREADS);
    long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    for (; item < table.header.count; item += stride) {
        apply_chunk<S, Rule, THREADS, Table, T...>(works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
        if constexpr (THREADS > 32) __syncthreads();  // the next fetch overwrites what this chunk reads
        else __syncwarp();
    }
}
