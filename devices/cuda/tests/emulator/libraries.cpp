// What stands on the driver of driver.cpp: matrix products as cuBLASLt takes them, cuDNN's graphs, NCCL between threads of one
// process, NVML's facts.

#include <algorithm>

#include "driver.cpp"

// ---- cuBLASLt ----

struct ProductDescription {
    int compute, transposed[2], epilogue;
    const void* bias;
    void* matrix;
    int64_t matrix_stride;
    const float* scales[2];
};
struct Layout {
    int element;
    u64 rows, columns;
    int64_t stride;
};


static float small_float(unsigned code, int mantissa, int bias) {
    int exponent = code >> mantissa & ((1 << (7 - mantissa)) - 1), fraction = code & ((1 << mantissa) - 1);
    bool e4m3 = mantissa == 3;
    float sign = code & 0x80 ? -1.0f : 1.0f;
    if (e4m3 && (code & 0x7f) == 0x7f) return NAN;
    if (!e4m3 && exponent == 31) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexpf((float)fraction, 1 - bias - mantissa);
    return sign * ldexpf((float)((1 << mantissa) + fraction), exponent - bias - mantissa);
}

static float read_element(const void* data, int element, size_t i) {
    if (element == 0) return ((const float*)data)[i];
    if (element == 14) {
        uint32_t bits = (uint32_t)((const uint16_t*)data)[i] << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    unsigned code = ((const uint8_t*)data)[i];
    return element == 28 ? small_float(code, 3, 7) : small_float(code, 2, 15);
}

static void write_element(void* data, int element, size_t i, float x) {
    if (element == 0) {
        ((float*)data)[i] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    ((uint16_t*)data)[i] = nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &bits, 4);
    return x;
}

API cublasLtCreate(void** handle) {
    *handle = (void*)1;
    return 0;
}
API cublasLtDestroy(void*) { return 0; }
API cublasLtMatmulDescCreate(ProductDescription** product, int compute, int) {
    *product = new ProductDescription{compute, {0, 0}, 1, nullptr, nullptr, 0, {nullptr, nullptr}};
    return 0;
}
API cublasLtMatmulDescDestroy(ProductDescription* product) {
    delete product;
    return 0;
}
API cublasLtMatmulDescSetAttribute(ProductDescription* product, int attribute, const void* value, size_t bytes) {
    void* to = attribute == 3    ? (void*)&product->transposed[0]
               : attribute == 4  ? (void*)&product->transposed[1]
               : attribute == 7  ? (void*)&product->epilogue
               : attribute == 8  ? (void*)&product->bias
               : attribute == 11 ? (void*)&product->matrix
               : attribute == 12 ? (void*)&product->matrix_stride
               : attribute == 17 ? (void*)&product->scales[0]
               : attribute == 18 ? (void*)&product->scales[1]
                                 : nullptr;
    if (!to || bytes != (attribute < 8 ? 4 : 8)) return 7;
    memcpy(to, value, bytes);
    return 0;
}
API cublasLtMatrixLayoutCreate(Layout** layout, int element, u64 rows, u64 columns, int64_t stride) {
    *layout = new Layout{element, rows, columns, stride};
    return 0;
}
API cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return 0;
}
API cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = (void*)1;
    return 0;
}
API cublasLtMatmulPreferenceDestroy(void*) { return 0; }
API cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }

// What follows a product: bits of a GELU, of a bias before it, and of a matrix that the GELU's input goes to; or the
// slope of a GELU whose input lies there. Of these types and alignments only.
static bool takes_epilogue(const ProductDescription& p, const Layout& a, const Layout& b, const Layout& d) {
    enum { BIAS = 4, GELU = 32, MATRIX = 128, SLOPE = 192 };
    int known[] = {1, BIAS, GELU, GELU | BIAS, GELU | MATRIX, GELU | MATRIX | BIAS, SLOPE};
    if (std::find(std::begin(known), std::end(known), p.epilogue) == std::end(known)) return false;
    if ((p.epilogue & BIAS) && !p.bias) return false;
    if (p.epilogue < GELU) return true;
    bool lies = p.matrix && (uintptr_t)p.matrix % 16 == 0 && p.matrix_stride % 8 == 0 && p.matrix_stride >= (int64_t)d.rows;
    return a.element == 14 && b.element == 14 && d.element == 14 && (!(p.epilogue & MATRIX) || lies);
}

// The GELU by tanh, and its slope.
static double gelu(double x, bool slope) {
    double scale = std::sqrt(2.0 / M_PI), t = std::tanh(scale * (x + 0.044715 * x * x * x));
    if (!slope) return 0.5 * x * (1.0 + t);
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3.0 * 0.044715 * x * x);
}

static bool fits(const ProductDescription& p, const Layout& a, const Layout& b, const Layout& d) {
    u64 m = p.transposed[0] ? a.columns : a.rows, k = p.transposed[0] ? a.rows : a.columns;
    u64 inner = p.transposed[1] ? b.columns : b.rows, n = p.transposed[1] ? b.rows : b.columns;
    bool eight = a.element >= 28;
    // Eight bits want both operands along the contracted length, and sizes that are multiples of 16.
    bool takes = !eight || (p.transposed[0] && !p.transposed[1] && m % 16 == 0 && k % 16 == 0 && n % 16 == 0);
    return takes && m == d.rows && n == d.columns && k == inner && takes_epilogue(p, a, b, d);
}

// EMULATED_GELUS says what comes of products that take a GELU: "refused", there is no algorithm for them, or "fail".
static const char* without_gelus(const ProductDescription& p) { return p.epilogue < 32 ? nullptr : getenv("EMULATED_GELUS"); }

API cublasLtMatmulAlgoGetHeuristic(void*, ProductDescription* p, Layout* a, Layout* b, Layout*, Layout* d, void*,
                                   int asked, void* results, int* found) {
    memset(results, 0, 96);
    if (const char* how = without_gelus(*p)) {
        // That there is none may be said of what was found, by the result, or by finding none.
        *found = (p->epilogue & 192) == 128;
        ((int*)results)[18] = 15;
        return how == std::string("fail") ? 14 : (p->epilogue & 192) == 192 ? 15 : 0;
    }
    *found = asked > 0 && fits(*p, *a, *b, *d);
    return *found ? 0 : 15;
}

API cublasLtMatmul(void*, ProductDescription* product, const float* alpha, const void* a, Layout* a_layout,
                   const void* b, Layout* b_layout, const float* beta, const void* c, Layout*, void* d,
                   Layout* d_layout, const void*, u64, size_t, Stream* stream) {
    ProductDescription p = *product;
    Layout la = *a_layout, lb = *b_layout, ld = *d_layout;
    if (without_gelus(p) || !fits(p, la, lb, ld)) return 15;
    float one = *alpha, more = *beta;
    stream->push([=] {
        u64 k = p.transposed[0] ? la.rows : la.columns;
        float scale = one * (p.scales[0] ? *p.scales[0] : 1.0f) * (p.scales[1] ? *p.scales[1] : 1.0f);
        auto round = [&](float x) { return p.compute == 77 ? tf32(x) : x; };
        std::vector<float> left(ld.rows * k), right(ld.columns * k);
        for (u64 i = 0; i < ld.rows; i++)
            for (u64 l = 0; l < k; l++)
                left[i * k + l] = round(
                    read_element(a, la.element, p.transposed[0] ? l + i * la.stride : i + l * la.stride));
        for (u64 j = 0; j < ld.columns; j++)
            for (u64 l = 0; l < k; l++)
                right[j * k + l] = round(
                    read_element(b, lb.element, p.transposed[1] ? j + l * lb.stride : l + j * lb.stride));
        for (u64 j = 0; j < ld.columns; j++)
            for (u64 i = 0; i < ld.rows; i++) {
                double sum = 0.0;
                for (u64 l = 0; l < k; l++) sum += (double)left[i * k + l] * right[j * k + l];
                u64 at = i + j * ld.stride;
                float x = (float)(sum * scale);
                if (more != 0.0f) x += more * read_element(c, ld.element, at);
                if (p.epilogue & 4) x += read_element(p.bias, ld.element, i);
                u64 beside = i + j * p.matrix_stride;
                if (p.epilogue == 192) {
                    x *= gelu(read_element(p.matrix, ld.element, beside), true);
                } else if (p.epilogue & 32) {
                    if (p.epilogue & 128) write_element(p.matrix, ld.element, beside, x);
                    x = gelu(x, false);
                }
                write_element(d, ld.element, at, x);
            }
    });
    return 0;
}

// ---- cuDNN ----

#include "cudnn.cpp"

// ---- NCCL ----

struct Unique {
    char bytes[128];
};

// What a rank shows the others: elements of a collective, bytes of a message.
struct Shown {
    const void* from;
    size_t count;
    std::shared_ptr<void> held;
};

struct NcclGroup {
    int size;
    std::mutex lock;
    std::condition_variable changed;
    int joined = 0;
    // By number of the collective: who shows what, and how many are done with it.
    std::map<u64, std::map<int, Shown>> shown;
    std::map<u64, int> finished;
    // By sender and receiver.
    std::map<std::pair<int, int>, std::deque<std::pair<Shown, std::shared_ptr<bool>>>> sent;
};

struct Comm {
    std::shared_ptr<NcclGroup> group;
    int rank;
    u64 next = 0;
    // By this rank alone: the others go on waiting.
    std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
    // Its calls in captured work that is still there.
    std::shared_ptr<int> captured = std::make_shared<int>(0);
};

static std::map<std::string, std::shared_ptr<NcclGroup>> nccl_groups;
static std::mutex nccl_lock;
static u64 nccl_ids = 0;

static size_t nccl_bytes(int element) { return element == 7 ? 4 : element == 9 ? 2 : 1; }

API ncclGetVersion(int* version) {
    *version = atoi(variable("EMULATED_NCCL", "22703").c_str());
    return 0;
}
API ncclGetUniqueId(Unique* id) {
    std::lock_guard<std::mutex> hold(nccl_lock);
    memset(id, 0, sizeof(*id));
    snprintf(id->bytes, sizeof(id->bytes), "%d-%llu", getpid(), (unsigned long long)nccl_ids++);
    return 0;
}
API ncclCommInitRank(Comm** comm, int size, Unique id, int rank) {
    std::shared_ptr<NcclGroup> group;
    {
        std::lock_guard<std::mutex> hold(nccl_lock);
        auto& known = nccl_groups[id.bytes];
        if (!known) known = std::make_shared<NcclGroup>();
        group = known;
    }
    std::unique_lock<std::mutex> hold(group->lock);
    group->size = size;
    group->joined++;
    group->changed.notify_all();
    group->changed.wait(hold, [&] { return group->joined >= size; });
    *comm = new Comm{group, rank};
    return 0;
}
API ncclCommGetAsyncError(Comm*, int* error) {
    *error = 0;
    return 0;
}

struct Queued {
    Stream* stream;
    std::shared_ptr<void> counted;
    // Of a group of calls, all begin before any works, and all have worked before any waits for its peer.
    Task begin, work, end;
};
static thread_local int depth = 0;
static thread_local std::vector<Queued> queued;
static thread_local std::vector<Comm*> leaving;

// As NCCL: nobody is let go of before all captured work with calls of it is gone.
static void leave() {
    std::vector<Comm*> all;
    all.swap(leaving);
    for (Comm* comm : all) {
        std::unique_lock<std::mutex> hold(comm->group->lock);
        comm->group->changed.wait(hold, [&] { return *comm->captured == 0; });
    }
}

API ncclCommDestroy(Comm* comm) {
    leaving.push_back(comm);
    if (depth == 0) leave();
    return 0;
}
API ncclCommAbort(Comm* comm) {
    {
        std::lock_guard<std::mutex> hold(comm->group->lock);
        *comm->aborted = true;
        comm->group->changed.notify_all();
    }
    return ncclCommDestroy(comm);
}

static void flush() {
    std::vector<Queued> all;
    all.swap(queued);
    if (all.empty()) return;
    Stream* stream = all[0].stream;
    stream->push([all] {
        for (const Queued& one : all)
            if (one.begin) one.begin();
        for (const Queued& one : all)
            if (one.work) one.work();
        for (const Queued& one : all)
            if (one.end) one.end();
    });
}

// A captured call counts as long as it may be made.
static std::shared_ptr<void> counted(Comm* comm, Stream* stream) {
    if (!stream->is_captured()) return nullptr;
    auto group = comm->group;
    auto captured = comm->captured;
    std::lock_guard<std::mutex> hold(group->lock);
    ++*captured;
    return std::shared_ptr<void>(comm, [=](void*) {
        std::lock_guard<std::mutex> hold(group->lock);
        --*captured;
        group->changed.notify_all();
    });
}

static int queue(Comm* comm, Stream* stream, Task begin, Task work, Task end) {
    queued.push_back({stream, counted(comm, stream), std::move(begin), std::move(work), std::move(end)});
    if (depth == 0) flush();
    return 0;
}

API ncclGroupStart() {
    depth++;
    return 0;
}
API ncclGroupEnd() {
    if (--depth > 0) return 0;
    flush();
    leave();
    return 0;
}

typedef std::map<int, Shown> Everyone;

// Every rank shows a copy of `count` elements (a rank that shows nothing gives no address), has `make` read what all
// show, and stays until all have.
static int collective(Comm* comm, Stream* stream, const void* from, size_t count, int element,
                      std::function<void(Everyone&)> make) {
    auto group = comm->group;
    auto aborted = comm->aborted;
    int rank = comm->rank;
    auto work = [=] {
        // Captured calls are made again and again.
        u64 number = comm->next++;
        auto copy = std::make_shared<std::vector<unsigned char>>();
        if (from) copy->assign((const unsigned char*)from, (const unsigned char*)from + count * nccl_bytes(element));
        std::unique_lock<std::mutex> hold(group->lock);
        group->shown[number][rank] = {copy->data(), count, copy};
        group->changed.notify_all();
        auto there = [&] { return (int)group->shown[number].size() == group->size; };
        group->changed.wait(hold, [&] { return *aborted || there(); });
        if (!there()) return;
        Everyone all = group->shown[number];
        hold.unlock();
        for (auto& one : all)
            if (one.second.count != count) {
                fprintf(stderr, "emulated NCCL: ranks of a collective have other counts\n");
                abort();
            }
        make(all);
        hold.lock();
        group->finished[number]++;
        group->changed.notify_all();
        group->changed.wait(hold, [&] { return *aborted || group->finished[number] == group->size; });
    };
    return queue(comm, stream, nullptr, work, nullptr);
}

static void reduced(Everyone& all, size_t first, void* to, size_t count, int element, int operation) {
    int kind = element == 9 ? 14 : 0;
    for (size_t i = 0; i < count; i++) {
        double sum = operation == 2 ? -INFINITY : 0.0;
        for (auto& one : all) {
            double x = read_element(one.second.from, kind, first + i);
            sum = operation == 2 ? std::fmax(sum, x) : sum + x;
        }
        write_element(to, kind, i, (float)sum);
    }
}

API ncclAllReduce(const void* from, void* to, size_t count, int element, int operation, Comm* comm, Stream* stream) {
    return collective(comm, stream, from, count, element,
                      [=](Everyone& all) { reduced(all, 0, to, count, element, operation); });
}
API ncclReduceScatter(const void* from, void* to, size_t count, int element, int operation, Comm* comm,
                      Stream* stream) {
    size_t first = count * comm->rank;
    return collective(comm, stream, from, count * comm->group->size, element,
                      [=](Everyone& all) { reduced(all, first, to, count, element, operation); });
}
API ncclReduce(const void* from, void* to, size_t count, int element, int operation, int root, Comm* comm,
               Stream* stream) {
    bool here = comm->rank == root;
    return collective(comm, stream, from, count, element, [=](Everyone& all) {
        if (here) reduced(all, 0, to, count, element, operation);
    });
}
API ncclAllGather(const void* from, void* to, size_t count, int element, Comm* comm, Stream* stream) {
    return collective(comm, stream, from, count, element, [=](Everyone& all) {
        size_t bytes = count * nccl_bytes(element);
        for (auto& one : all) memcpy((char*)to + one.first * bytes, one.second.from, bytes);
    });
}
API ncclBroadcast(const void* from, void* to, size_t count, int element, int root, Comm* comm, Stream* stream) {
    const void* shown = comm->rank == root ? from : nullptr;
    return collective(comm, stream, shown, count, element,
                      [=](Everyone& all) { memcpy(to, all[root].from, count * nccl_bytes(element)); });
}
// A message leaves when its receiver takes it, not before.
API ncclSend(const void* from, size_t count, int element, int peer, Comm* comm, Stream* stream) {
    auto group = comm->group;
    auto aborted = comm->aborted;
    auto taken = std::make_shared<std::shared_ptr<bool>>();
    std::pair<int, int> way(comm->rank, peer);
    auto begin = [=] {
        std::lock_guard<std::mutex> hold(group->lock);
        *taken = std::make_shared<bool>(false);
        group->sent[way].push_back({{from, count * nccl_bytes(element), nullptr}, *taken});
        group->changed.notify_all();
    };
    return queue(comm, stream, begin, nullptr, [=] {
        std::unique_lock<std::mutex> hold(group->lock);
        group->changed.wait(hold, [&] { return *aborted || **taken; });
    });
}
API ncclRecv(void* to, size_t count, int element, int peer, Comm* comm, Stream* stream) {
    auto group = comm->group;
    auto aborted = comm->aborted;
    std::pair<int, int> way(peer, comm->rank);
    size_t bytes = count * nccl_bytes(element);
    auto work = [=] {
        std::unique_lock<std::mutex> hold(group->lock);
        auto& line = group->sent[way];
        group->changed.wait(hold, [&] { return *aborted || !line.empty(); });
        if (line.empty()) return;
        if (line.front().first.count != bytes) {
            fprintf(stderr, "emulated NCCL: a message has another size than its receiver expects\n");
            abort();
        }
        memcpy(to, line.front().first.from, bytes);
        *line.front().second = true;
        line.pop_front();
        group->changed.notify_all();
    };
    return queue(comm, stream, nullptr, work, nullptr);
}

// ---- NVML ----

API nvmlInit_v2() { return 0; }
API nvmlShutdown() { return 0; }
API nvmlSystemGetDriverVersion(char* version, unsigned length) {
    snprintf(version, length, "0.1 (emulated)");
    return 0;
}
API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    *device = (void*)(intptr_t)(index + 1);
    return 0;
}
API nvmlDeviceGetName(void*, char* name, unsigned length) {
    snprintf(name, length, "Emulated GPU");
    return 0;
}
static int number(unsigned* to, unsigned value) {
    *to = value;
    return 0;
}
API nvmlDeviceGetClockInfo(void*, int, unsigned* megahertz) { return number(megahertz, 1000); }
API nvmlDeviceGetMaxClockInfo(void*, int, unsigned* megahertz) { return number(megahertz, 1000); }
API nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) { return number(milliwatts, 1000); }
API nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* milliwatts) { return number(milliwatts, 1000); }
API nvmlDeviceGetTemperature(void*, int, unsigned* celsius) { return number(celsius, 20); }
