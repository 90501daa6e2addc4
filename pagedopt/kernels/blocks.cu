// Multi-tensor apply over lists in any format. A thread takes WIDTH consecutive elements. A format may exchange values
// between the threads of one of its blocks, or use the position of an element. Therefore a row of the table has two
// more words, the indices of its parameter and of its first element there, and a set of hyperparameters has a seed.

// The elements of one thread, as a format loads or stores them.
struct Spot {
    const word* columns;  // addresses of the format's columns
    long long at;         // index of the first element in the row
    int live;             // number of elements; fewer than WIDTH at the end of the row
    long long row;        // index of the parameter
    long long index;      // index of the first element in the parameter
    unsigned long long seed;
    template <class T> __device__ T* column(int i) const { return (T*)columns[i]; }
};

// Reduce one value per thread over the threads that share a block of BLOCK_NUMEL elements, WIDTH elements each.
template <int BLOCK_NUMEL, int WIDTH, class S> __device__ S block_max(S value) {
    for (int step = BLOCK_NUMEL / WIDTH / 2; step; step >>= 1)
        value = element_max<S>(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}
template <int BLOCK_NUMEL, int WIDTH, class S> __device__ S block_sum(S value) {
    for (int step = BLOCK_NUMEL / WIDTH / 2; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// A list of plain numbers in a launch with a format that is not plain.
template <class T> struct Plain {
    static constexpr int columns = 1;
    template <class S, int WIDTH> static __device__ void load(S (&x)[WIDTH], const Spot& spot) {
        typedef Pack<T, WIDTH> Whole;
        const T* from = spot.column<const T>(0) + spot.at;
        if (spot.live == WIDTH && (word)from % alignof(Whole) == 0) {
            const Whole pack = *(const Whole*)from;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) x[i] = load_as<S, T>(pack.value[i]);
        } else
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < spot.live) x[i] = load_as<S, T>(from[i]);
    }
    template <class S, int WIDTH> static __device__ void store(const S (&x)[WIDTH], const Spot& spot) {
        typedef Pack<T, WIDTH> Whole;
        T* to = spot.column<T>(0) + spot.at;
        if (spot.live == WIDTH && (word)to % alignof(Whole) == 0) {
            Whole pack;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) pack.value[i] = store_as<T, S>(x[i]);
            *(Whole*)to = pack;
        } else
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < spot.live) to[i] = store_as<T, S>(x[i]);
    }
};

// Load the lists LIST, LIST + 1, … in the formats F, Rest…; spot.columns begins with the columns of F.
template <int LIST, class Rule, class S, int WIDTH, class F, class... Rest>
__device__ __forceinline__ void load_all(S (&in)[WIDTH][Rule::lists], Spot spot) {
    if constexpr ((Rule::reads >> LIST) & 1) {
        S x[WIDTH] = {};
        F::template load<S, WIDTH>(x, spot);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) in[i][LIST] = x[i];
    }
    if constexpr (sizeof...(Rest) > 0) {
        spot.columns += F::columns;
        load_all<LIST + 1, Rule, S, WIDTH, Rest...>(in, spot);
    }
}

template <int LIST, class Rule, class S, int WIDTH, class F, class... Rest>
__device__ __forceinline__ void store_all(const S (&out)[WIDTH][Rule::outputs], Spot spot) {
    if constexpr ((Rule::writes >> LIST) & 1) {
        S x[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x[i] = i < spot.live ? out[i][Rule::output_of(LIST)] : S(0);
        F::template store<S, WIDTH>(x, spot);
    }
    if constexpr (sizeof...(Rest) > 0) {
        spot.columns += F::columns;
        store_all<LIST + 1, Rule, S, WIDTH, Rest...>(out, spot);
    }
}

template <class S, int COLUMNS, int UNIFORMS> struct BlockWork {
    Work<S, COLUMNS + 2, UNIFORMS> work;
    unsigned long long seed;
};

// One chunk, by one warp or block. All threads run every round, as formats may exchange values between them.
template <class S, class Rule, int THREADS, int WIDTH, int COLUMNS, class Table, class... F>
__device__ __forceinline__ void apply_blocks_to_chunk(
    BlockWork<S, COLUMNS, Rule::uniforms>& shared, const Table& table, long long item, int lane) {
    constexpr int STRIDE = Rule::uniforms + 1;
    if (lane < 32) {
        const long long set = fetch<STRIDE>(shared.work, table, item, lane);
        if (lane == 0)
            shared.seed = (unsigned long long)((const double*)table.data())[set * STRIDE + Rule::uniforms];
    }
    if constexpr (THREADS > 32) __syncthreads();
    else __syncwarp();

    const long long most = table.header.chunk_numel;
    const int numel = (int)(shared.work.left < most ? shared.work.left : most);
    word columns[COLUMNS];
    S u[Rule::uniforms ? Rule::uniforms : 1];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) columns[i] = shared.work.address[i];
#pragma unroll
    for (int i = 0; i < Rule::uniforms; ++i) u[i] = shared.work.u[i];
    Spot spot;
    spot.columns = columns;
    spot.row = (long long)shared.work.address[COLUMNS];
    spot.seed = shared.seed;
    const long long first = (long long)shared.work.address[COLUMNS + 1];
    for (int round = 0; round < numel; round += THREADS * WIDTH) {
        const int left = numel - round - lane * WIDTH;
        spot.at = shared.work.offset + round + lane * WIDTH;
        spot.index = first + spot.at;
        spot.live = left < 0 ? 0 : left < WIDTH ? left : WIDTH;
        S in[WIDTH][Rule::lists], out[WIDTH][Rule::outputs];
        load_all<0, Rule, S, WIDTH, F...>(in, spot);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) Rule::template apply<S>(in[i], u, out[i]);
        store_all<0, Rule, S, WIDTH, F...>(out, spot);
    }
}

template <class S, class Rule, int THREADS, int WIDTH, class Table, class... F>
__global__ void __launch_bounds__(BLOCK) multi_tensor_apply_blocks(const __grid_constant__ Table table) {
    constexpr int COLUMNS = (F::columns + ...);
    __shared__ BlockWork<S, COLUMNS, Rule::uniforms> works[BLOCK / THREADS];
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;  // all threads of a chunk return together
    apply_blocks_to_chunk<S, Rule, THREADS, WIDTH, COLUMNS, Table, F...>(
        works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
}

template <class S, class Rule, int THREADS, int WIDTH, class Table, class... F>
__global__ void __launch_bounds__(BLOCK) multi_tensor_apply_blocks_small_grid(const __grid_constant__ Table table) {
    constexpr int COLUMNS = (F::columns + ...);
    __shared__ BlockWork<S, COLUMNS, Rule::uniforms> works[BLOCK / THREADS];
    const long long stride = (long long)gridDim.x * (BLOCK / THREADS);
    long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    for (; item < table.header.count; item += stride) {
        apply_blocks_to_chunk<S, Rule, THREADS, WIDTH, COLUMNS, Table, F...>(
            works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
        if constexpr (THREADS > 32) __syncthreads();  // the next fetch overwrites what this chunk reads
        else __syncwarp();
    }
}
