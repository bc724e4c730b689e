// cuDNN's graphs of operators, each run as its documentation says what it computes: one after the other, in
// 64 bits, every tensor whole. Tensors of 16 bits are rounded.

#include <map>
#include <memory>

namespace cudnn {

struct Descriptor;
using Shared = std::shared_ptr<Descriptor>;

struct Descriptor {
    int kind = 0;
    bool finished = false;
    std::map<int, std::vector<char>> values;
    std::map<int, std::vector<Shared>> others;

    template <class T>
    std::vector<T> all(int name) {
        auto& bytes = values[name];
        std::vector<T> all(bytes.size() / sizeof(T));
        memcpy(all.data(), bytes.data(), bytes.size());
        return all;
    }
    template <class T>
    T one(int name, T otherwise = T()) {
        return values.count(name) ? all<T>(name)[0] : otherwise;
    }
    Shared other(int name) { return others.count(name) ? others[name][0] : nullptr; }
};

struct Library {
    Stream* stream;
};

enum { OK = 0, BAD = 2000, NOT_SUPPORTED = 3000 };
enum { F32 = 0, I32 = 4, BF16 = 9, BOOLEAN = 11 };
enum { GRAPH = 15, PLAN = 5, ENGINE = 3, HEURISTICS = 4, TENSOR = 17 };

static int size_of(int type) {
    switch (type) {
    case 1: case 8: case 14: case 18: return 4;
    case 2: case 24: return 1;
    default: return 8;
    }
}

// A tensor with its numbers.
struct Tensor {
    std::vector<int64_t> sizes, strides;
    std::vector<double> numbers;
    int element;

    explicit Tensor(Descriptor& said)
        : sizes(said.all<int64_t>(902)), strides(said.all<int64_t>(903)), element(said.one<int>(901)) {
        int64_t count = 1;
        for (int64_t size : sizes) count *= size;
        numbers.resize(count);
    }
    void indices(size_t at, int64_t to[4]) const {
        for (int d = 3; d >= 0; d--) {
            to[d] = at % sizes[d];
            at /= sizes[d];
        }
    }
    size_t place(const int64_t at[4]) const {
        size_t place = 0;
        for (int d = 0; d < 4; d++) place += at[d] * strides[d];
        return place;
    }
    // The number at an index of a larger tensor: one stands for all, a head for those that share it.
    double& near(const int64_t at[4], const std::vector<int64_t>& larger) {
        size_t index = 0;
        for (int d = 0; d < 4; d++) index = index * sizes[d] + at[d] / (larger[d] / sizes[d]);
        return numbers[index];
    }
    void round() {
        if (element == BF16)
            for (double& x : numbers) {
                uint16_t bits;
                write_element(&bits, 14, 0, (float)x);
                x = read_element(&bits, 14, 0);
            }
        if (element == F32)
            for (double& x : numbers) x = (float)x;
    }
    void move(void* memory, bool store) {
        int64_t at[4];
        for (size_t i = 0; i < numbers.size(); i++) {
            indices(i, at);
            size_t where = place(at);
            int kind = element == BF16 ? 14 : 0;
            if (store) write_element(memory, kind, where, (float)numbers[i]);
            else numbers[i] = element == I32 ? ((int32_t*)memory)[where] : read_element(memory, kind, where);
        }
    }
};

// A graph with the memory of its tensors.
struct Run {
    std::map<int64_t, void*> memory;
    std::map<int64_t, std::shared_ptr<Tensor>> made;

    static int64_t id(const Shared& tensor) { return tensor->one<int64_t>(906); }

    Tensor& in(const Shared& said) {
        auto& tensor = made[id(said)];
        if (!tensor) {
            tensor = std::make_shared<Tensor>(*said);
            if (!memory.count(id(said))) {
                fprintf(stderr, "emulated cuDNN: tensor %ld is read before it is made\n", (long)id(said));
                abort();
            }
            tensor->move(memory[id(said)], false);
        }
        return *tensor;
    }

    void out(const Shared& said, const Tensor& tensor) {
        auto kept = std::make_shared<Tensor>(tensor);
        kept->round();
        bool within = said->one<char>(907);
        if (!within) kept->move(memory.at(id(said)), true);
        made[id(said)] = kept;
    }

    void product(Descriptor& op) {
        Tensor &a = in(op.other(1520)), &b = in(op.other(1521)), c(*op.other(1522));
        std::vector<int64_t> rows = {c.sizes[0], c.sizes[1], c.sizes[2], a.sizes[3]};
        std::vector<int64_t> columns = {c.sizes[0], c.sizes[1], b.sizes[2], c.sizes[3]};
        int64_t at[4];
        for (size_t i = 0; i < c.numbers.size(); i++) {
            c.indices(i, at);
            double sum = 0.0;
            for (int64_t k = 0; k < a.sizes[3]; k++) {
                int64_t x[4] = {at[0], at[1], at[2], k}, y[4] = {at[0], at[1], k, at[3]};
                sum += a.near(x, rows) * b.near(y, columns);
            }
            c.numbers[i] = sum;
        }
        out(op.other(1522), c);
    }

    void pointwise(Descriptor& op) {
        Descriptor& what = *op.other(750);
        int mode = what.one<int>(0);
        Tensor &x = in(op.other(751)), y(*op.other(753));
        Tensor* b = op.other(752) ? &in(op.other(752)) : nullptr;
        Tensor* t = op.other(758) ? &in(op.other(758)) : nullptr;
        int64_t at[4];
        for (size_t i = 0; i < y.numbers.size(); i++) {
            y.indices(i, at);
            double first = x.near(at, y.sizes), second = b ? b->near(at, y.sizes) : 0.0;
            double& to = y.numbers[i];
            switch (mode) {
            case 0: to = first + second; break;
            case 1: to = first * second; break;
            case 6: to = first / second; break;
            case 9: to = first - second; break;
            case 13: to = exp(first); break;
            case 15: to = log(first); break;
            case 21: to = first; break;
            case 302: to = first > second; break;
            case 303: to = first >= second; break;
            case 501: to = (double)at[what.one<int64_t>(9)]; break;
            case 601: to = t->near(at, y.sizes) != 0.0 ? first : second; break;
            default: fprintf(stderr, "emulated cuDNN: pointwise mode %d\n", mode); abort();
            }
        }
        out(op.other(753), y);
    }

    void reduce(Descriptor& op) {
        bool largest = op.other(1612)->one<int>(1600) == 3;
        Tensor &x = in(op.other(1610)), y(*op.other(1611));
        for (double& to : y.numbers) to = largest ? -INFINITY : 0.0;
        int64_t at[4];
        for (size_t i = 0; i < x.numbers.size(); i++) {
            x.indices(i, at);
            double& to = y.near(at, x.sizes);
            to = largest ? fmax(to, x.numbers[i]) : to + x.numbers[i];
        }
        out(op.other(1611), y);
    }

    // The numbers as they lie, read by other sizes and strides.
    void reshape(Descriptor& op) {
        Tensor &x = in(op.other(2200)), y(*op.other(2201));
        std::map<size_t, double> lies;
        int64_t at[4];
        for (size_t i = 0; i < x.numbers.size(); i++) {
            x.indices(i, at);
            lies[x.place(at)] = x.numbers[i];
        }
        for (size_t i = 0; i < y.numbers.size(); i++) {
            y.indices(i, at);
            y.numbers[i] = lies.at(y.place(at));
        }
        out(op.other(2201), y);
    }

    void all(Descriptor& graph) {
        for (auto& op : graph.others[801]) {
            switch (op->kind) {
            case 13: pointwise(*op); break;
            case 19: product(*op); break;
            case 22: reduce(*op); break;
            case 31: reshape(*op); break;
            default: fprintf(stderr, "emulated cuDNN: operator %d\n", op->kind); abort();
            }
        }
    }
};

// Where heads share a key, what each of them adds to its gradient lies in the workspace.
static int64_t workspace(Descriptor& graph) {
    int64_t bytes = 256;
    for (auto& op : graph.others[801])
        if (op->kind == 22) {
            Tensor x(*op->other(1610)), y(*op->other(1611));
            if (y.sizes[1] < x.sizes[1]) bytes += 2 * x.numbers.size();
        }
    return bytes;
}

}  // namespace cudnn

using CudnnHandle = cudnn::Shared*;

// EMULATED_CUDNN says its release, and what it returns when it is to start.
static int cudnn_said(int which) {
    int said[4] = {9, 19, 0, cudnn::OK};
    sscanf(variable("EMULATED_CUDNN", "").c_str(), "%d.%d.%d %d", said, said + 1, said + 2, said + 3);
    return said[which];
}
API cudnnGetProperty(int which, int* value) {
    *value = cudnn_said(which);
    return cudnn::OK;
}
API cudnnCreate(cudnn::Library** library) {
    *library = new cudnn::Library();
    return cudnn_said(3);
}
API cudnnDestroy(cudnn::Library* library) {
    delete library;
    return cudnn::OK;
}
API cudnnSetStream(cudnn::Library* library, Stream* stream) {
    library->stream = stream;
    return cudnn::OK;
}
API cudnnBackendCreateDescriptor(int kind, CudnnHandle* made) {
    *made = new cudnn::Shared(std::make_shared<cudnn::Descriptor>());
    (**made)->kind = kind;
    return cudnn::OK;
}
API cudnnBackendDestroyDescriptor(CudnnHandle descriptor) {
    delete descriptor;
    return cudnn::OK;
}
API cudnnBackendSetAttribute(CudnnHandle descriptor, int name, int type, int64_t count, const void* values) {
    cudnn::Descriptor& to = **descriptor;
    if (to.finished) return cudnn::BAD;
    if (type != 15) {
        to.values[name].assign((const char*)values, (const char*)values + count * cudnn::size_of(type));
        return cudnn::OK;
    }
    auto& others = to.others[name];
    others.clear();
    for (int64_t i = 0; i < count; i++) {
        others.push_back(*((CudnnHandle*)values)[i]);
        if (!others.back()->finished) return cudnn::BAD;
    }
    return cudnn::OK;
}
API cudnnBackendFinalize(CudnnHandle descriptor) {
    cudnn::Descriptor& of = **descriptor;
    if (of.kind == cudnn::TENSOR && (of.all<int64_t>(902).size() != 4 || of.all<int64_t>(903).size() != 4))
        return cudnn::BAD;
    if (of.kind == cudnn::GRAPH && (!of.values.count(800) || of.others[801].empty())) return cudnn::BAD;
    if (of.kind == cudnn::PLAN && (!of.values.count(400) || !of.other(401))) return cudnn::BAD;
    of.finished = true;
    return cudnn::OK;
}
API cudnnBackendGetAttribute(CudnnHandle descriptor, int name, int type, int64_t asked, int64_t* found,
                             void* values) {
    cudnn::Descriptor& of = **descriptor;
    if (!of.finished || asked < 1) return cudnn::BAD;
    *found = 1;
    if (name == 202 && type == 15) {
        // The first choice cannot be made ready: it has no graph.
        cudnn::Descriptor& bad = ***(CudnnHandle*)values;
        bad.finished = true;
        if (asked > 1) {
            cudnn::Descriptor& engine = **((CudnnHandle*)values)[1];
            engine.others[0] = {of.other(201)};
            engine.finished = true;
            *found = 2;
        }
        return cudnn::OK;
    }
    if (name == 402 && type == 3) {
        cudnn::Shared graph = of.other(401)->other(0);
        if (!graph) return cudnn::NOT_SUPPORTED;
        *(int64_t*)values = cudnn::workspace(*graph);
        return cudnn::OK;
    }
    return cudnn::BAD;
}
API cudnnBackendExecute(cudnn::Library* library, CudnnHandle plan, CudnnHandle pack) {
    cudnn::Shared graph = (*plan)->other(401)->other(0);
    auto ids = (*pack)->all<int64_t>(1000);
    auto pointers = (*pack)->all<void*>(1001);
    char* room = (*pack)->one<char*>(1003);
    auto run = std::make_shared<cudnn::Run>();
    for (size_t i = 0; i < ids.size(); i++) run->memory[ids[i]] = pointers[i];
    // Numbers of the host are read now, memory of the device when its turn comes.
    for (auto& op : graph->others[801])
        for (auto& said : op->others)
            for (auto& tensor : said.second)
                if (tensor->kind == cudnn::TENSOR && tensor->one<char>(908)) run->in(tensor);
    library->stream->push([=] {
        memset(room, 0xEE, cudnn::workspace(*graph));
        // Captured work runs again and again.
        cudnn::Run once = *run;
        once.all(*graph);
    });
    return cudnn::OK;
}
