// NVIDIA's libraries on a machine without a GPU, for tests: a driver whose streams are threads, a compiler that
// builds kernels for the host over emulator.h, matrix products, and NCCL between the threads of a process. One
// library under all their names. Memory holds NaNs until it is written and is checked around its edges when it
// is freed; what streams do is not ordered but by events, as on a device.
//
//   EMULATED_GPUS    devices [2]
//   EMULATED_MEMORY  bytes of each [4 GiB], or a list of them
//   EMULATED_HEADER  emulator.h
//   EMULATED_FOLDER  where built kernels are kept
//   EMULATED_NO_GRAPHS  a device that refuses to run captured work

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <sys/file.h>
#include <thread>
#include <unistd.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

typedef uint64_t u64;
typedef std::function<void()> Task;

const int INVALID = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, NOT_WHILE_CAPTURING = 900, NOT_JOINED = 904,
          NOT_CAPTURED = 905, OTHER_CAPTURE = 906, ONLY_CAPTURED = 907;
const size_t GUARD = 256;

static std::string variable(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value ? value : otherwise;
}

// ---- streams and events ----

// Work of a stream, and of those that it forked to, that is recorded instead of run. A line is a stream's part of it.
struct Capture {
    struct Step {
        size_t line;
        Task task;
        // An event that it reaches, or waits for, by its number.
        long reaches = -1, waits = -1;
    };
    std::vector<Step> steps;
    // By line, how many steps of every line it comes after.
    typedef std::vector<size_t> Seen;
    std::vector<Seen> seen;
    long events = 0;
    bool ended = false;

    size_t begin_line() {
        seen.emplace_back();
        return seen.size() - 1;
    }
    void add(Step step) {
        Seen& own = seen[step.line];
        own.resize(seen.size());
        if (step.reaches < 0) own[step.line]++;
        steps.push_back(std::move(step));
    }
    void come_after(size_t line, const Seen& other) {
        Seen& own = seen[line];
        own.resize(seen.size());
        for (size_t i = 0; i < other.size(); i++) own[i] = std::max(own[i], other[i]);
    }
    // Whether the first line comes after all others.
    bool is_joined() {
        seen[0].resize(seen.size());
        for (size_t line = 1; line < seen.size(); line++)
            if (seen[line].size() > line && seen[0][line] < seen[line][line]) return false;
        return true;
    }
};

struct Stream {
    int device;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Task> tasks;
    u64 given = 0, done = 0;
    bool closed = false;
    std::shared_ptr<Capture> capture;
    size_t line = 0;
    std::thread thread;

    explicit Stream(int device) : device(device), thread([this] { work(); }) {}

    void work() {
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            changed.wait(hold, [this] { return closed || !tasks.empty(); });
            if (tasks.empty()) return;
            Task task = tasks.front();
            tasks.pop_front();
            hold.unlock();
            task();
            hold.lock();
            done++;
            changed.notify_all();
        }
    }

    bool is_captured() {
        if (capture && capture->ended) capture.reset();
        return capture != nullptr;
    }

    void push(Task task) {
        std::lock_guard<std::mutex> hold(lock);
        if (is_captured()) {
            capture->add({line, std::move(task)});
            return;
        }
        tasks.push_back(std::move(task));
        given++;
        changed.notify_all();
    }

    void drain() {
        std::unique_lock<std::mutex> hold(lock);
        u64 all = given;
        changed.wait(hold, [&] { return done >= all; });
    }

    void close() {
        {
            std::lock_guard<std::mutex> hold(lock);
            closed = true;
            changed.notify_all();
        }
        thread.join();
    }
};

// One recording of an event.
struct Mark {
    std::mutex lock;
    std::condition_variable changed;
    bool reached = false;
    std::chrono::steady_clock::time_point time;

    void reach() {
        std::lock_guard<std::mutex> hold(lock);
        reached = true;
        time = std::chrono::steady_clock::now();
        changed.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [this] { return reached; });
    }
};

// Recorded while work ran, or while it was captured.
struct Event {
    std::shared_ptr<Mark> mark;
    std::shared_ptr<Capture> capture;
    long number = 0;
    Capture::Seen seen;
};

static std::mutex all_lock;
static std::set<Stream*> all_streams;
static thread_local int current_device = 0;

static void drain_device(int device) {
    std::vector<Stream*> streams;
    {
        std::lock_guard<std::mutex> hold(all_lock);
        for (Stream* stream : all_streams)
            if (stream->device == device) streams.push_back(stream);
    }
    for (Stream* stream : streams) stream->drain();
}

API cuStreamCreate(Stream** stream, unsigned) {
    *stream = new Stream(current_device);
    std::lock_guard<std::mutex> hold(all_lock);
    all_streams.insert(*stream);
    return 0;
}
API cuStreamDestroy_v2(Stream* stream) {
    {
        std::lock_guard<std::mutex> hold(all_lock);
        all_streams.erase(stream);
    }
    stream->close();
    delete stream;
    return 0;
}
API cuStreamSynchronize(Stream* stream) {
    if (stream->is_captured()) return NOT_WHILE_CAPTURING;
    stream->drain();
    return 0;
}
API cuEventCreate(Event** event, unsigned) {
    *event = new Event{};
    return 0;
}
API cuEventDestroy_v2(Event* event) {
    delete event;
    return 0;
}
API cuEventRecord(Event* event, Stream* stream) {
    if (stream->is_captured()) {
        Capture& capture = *stream->capture;
        *event = Event{nullptr, stream->capture, capture.events++, capture.seen[stream->line]};
        capture.add({stream->line, nullptr, event->number, -1});
        return 0;
    }
    auto mark = std::make_shared<Mark>();
    *event = Event{mark, nullptr, 0, {}};
    stream->push([mark] { mark->reach(); });
    return 0;
}
// A stream that waits for captured work is captured with it.
API cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    if (!event->capture) {
        auto mark = event->mark;
        if (!mark) return INVALID;
        if (stream->is_captured()) return NOT_CAPTURED;
        stream->push([mark] { mark->wait(); });
        return 0;
    }
    if (event->capture->ended) return ONLY_CAPTURED;
    if (!stream->is_captured()) {
        stream->capture = event->capture;
        stream->line = event->capture->begin_line();
    }
    if (stream->capture != event->capture) return OTHER_CAPTURE;
    stream->capture->come_after(stream->line, event->seen);
    stream->capture->add({stream->line, nullptr, -1, event->number});
    return 0;
}
API cuEventQuery(Event* event) {
    if (event->capture) return ONLY_CAPTURED;
    std::lock_guard<std::mutex> hold(event->mark->lock);
    return event->mark->reached ? 0 : NOT_READY;
}
API cuEventSynchronize(Event* event) {
    if (event->capture) return ONLY_CAPTURED;
    event->mark->wait();
    return 0;
}
API cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
    return 0;
}

// ---- devices and memory ----

struct Piece {
    unsigned char* base;
    size_t bytes;
    int device;
};
static std::map<u64, Piece> pieces;
static std::map<int, size_t> in_use;

static int device_count() { return atoi(variable("EMULATED_GPUS", "2").c_str()); }

static size_t capacity(int device) {
    std::stringstream list(variable("EMULATED_MEMORY", "4294967296"));
    std::string entry;
    for (int i = 0; i <= device && std::getline(list, entry, ','); i++) {}
    return strtoull(entry.c_str(), nullptr, 10);
}

API cuInit(unsigned) { return 0; }
API cuGetErrorName(int code, const char** name) {
    *name = code == NOT_WHILE_CAPTURING ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_EMULATED";
    return 0;
}
API cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}
API cuDeviceGetCount(int* count) {
    *count = device_count();
    return 0;
}
API cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < device_count() ? 0 : 101;
}
API cuDeviceGetName(char* name, int length, int) {
    snprintf(name, length, "Emulated GPU");
    return 0;
}
API cuDeviceTotalMem_v2(size_t* bytes, int device) {
    *bytes = capacity(device);
    return 0;
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 16 ? 3 : attribute == 38 ? 1 << 20 : attribute == 75 ? 9 : 0;
    return 0;
}
API cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = (void*)(intptr_t)(device + 1);
    return 0;
}
API cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API cuCtxSetCurrent(void* context) {
    current_device = (int)(intptr_t)context - 1;
    return 0;
}
API cuMemGetInfo_v2(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> hold(all_lock);
    *total = capacity(current_device);
    *free = *total - in_use[current_device];
    return 0;
}
API cuMemAlloc_v2(u64* address, size_t bytes) {
    std::lock_guard<std::mutex> hold(all_lock);
    if (in_use[current_device] + bytes > capacity(current_device)) return OUT_OF_MEMORY;
    size_t whole = (bytes + 2 * GUARD + 255) / 256 * 256;
    auto* base = (unsigned char*)aligned_alloc(256, whole);
    memset(base, 0xff, whole);
    *address = (u64)(base + GUARD);
    pieces[*address] = {base, bytes, current_device};
    in_use[current_device] += bytes;
    return 0;
}
API cuMemFree_v2(u64 address) {
    drain_device(current_device);
    std::lock_guard<std::mutex> hold(all_lock);
    auto found = pieces.find(address);
    if (found == pieces.end()) return INVALID;
    Piece piece = found->second;
    pieces.erase(found);
    in_use[piece.device] -= piece.bytes;
    for (size_t i = 0; i < GUARD; i++)
        if (piece.base[i] != 0xff || piece.base[GUARD + piece.bytes + i] != 0xff) {
            fprintf(stderr, "emulated driver: something wrote beside its memory\n");
            abort();
        }
    free(piece.base);
    return 0;
}
API cuMemAllocHost_v2(void** pointer, size_t bytes) {
    *pointer = malloc(bytes);
    return 0;
}
API cuMemFreeHost(void* pointer) {
    free(pointer);
    return 0;
}
// As late as the device may: the host's bytes must stay until then.
API cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Stream* stream) {
    stream->push([=] { memcpy((void*)to, from, bytes); });
    return 0;
}
API cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Stream* stream) {
    stream->push([=] { memcpy(to, (const void*)from, bytes); });
    return 0;
}
API cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream* stream) {
    stream->push([=] { memmove((void*)to, (const void*)from, bytes); });
    return 0;
}
API cuMemsetD8Async(u64 to, unsigned char value, size_t bytes, Stream* stream) {
    stream->push([=] { memset((void*)to, value, bytes); });
    return 0;
}

// ---- kernels ----

struct Function {
    std::shared_ptr<void> (*bind)(void**);
    void (*run)(void*, const unsigned*, unsigned, unsigned);
    std::mutex* running;
};
struct Module {
    void* library;
    std::mutex running;
    std::map<std::string, Function> functions;
};

static std::mutex modules_lock;
static std::map<std::string, Module*> modules;

// A module's static memory is shared by whoever loads it: one of its kernels runs at a time.
API cuModuleLoadData(Module** module, const void* image) {
    std::string path((const char*)image);
    std::lock_guard<std::mutex> hold(modules_lock);
    Module*& known = modules[path];
    if (!known) {
        void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) return 200;
        known = new Module{library, {}, {}};
    }
    *module = known;
    return 0;
}
API cuModuleUnload(Module*) { return 0; }
API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    std::lock_guard<std::mutex> hold(modules_lock);
    std::string text(name);
    auto* bind = dlsym(module->library, ("bind_" + text).c_str());
    auto* run = dlsym(module->library, ("run_" + text).c_str());
    if (!bind || !run) return 500;
    Function& made = module->functions[text];
    made.bind = (decltype(made.bind))bind;
    made.run = (decltype(made.run))run;
    made.running = &module->running;
    *function = &made;
    return 0;
}
API cuFuncSetAttribute(Function*, int, int) { return 0; }
API cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, Stream* stream, void** arguments, void**) {
    if (!gx || !gy || !gz || bx * by * bz > 1024) return INVALID;
    std::shared_ptr<void> bound = function->bind(arguments);
    auto* run = function->run;
    auto* running = function->running;
    stream->push([=] {
        unsigned sizes[6] = {gx, gy, gz, bx, by, bz};
        std::lock_guard<std::mutex> hold(*running);
        run(bound.get(), sizes, shared, 0);
    });
    return 0;
}

// ---- captured graphs ----

struct Graph {
    std::vector<Capture::Step> steps;
    size_t lines;
    long events;
};

struct Executable {
    Graph graph;
    // For all lines but the first, which runs where the graph is launched.
    std::vector<Stream*> others;

    ~Executable() {
        for (Stream* stream : others) {
            stream->drain();
            stream->close();
            delete stream;
        }
    }
};

API cuStreamBeginCapture_v2(Stream* stream, int) {
    std::lock_guard<std::mutex> hold(stream->lock);
    stream->capture = std::make_shared<Capture>();
    stream->line = stream->capture->begin_line();
    return 0;
}
API cuStreamEndCapture(Stream* stream, Graph** graph) {
    std::lock_guard<std::mutex> hold(stream->lock);
    std::shared_ptr<Capture> capture = std::move(stream->capture);
    capture->ended = true;
    // Streams and events still know the capture; what was recorded is the graph's alone.
    *graph = new Graph{std::move(capture->steps), capture->seen.size(), capture->events};
    if (capture->is_joined()) return 0;
    delete *graph;
    return NOT_JOINED;
}
API cuGraphInstantiateWithFlags(Executable** executable, Graph* graph, u64) {
    *executable = new Executable{*graph, {}};
    for (size_t line = 1; line < graph->lines; line++)
        (*executable)->others.push_back(new Stream(current_device));
    return 0;
}
API cuGraphLaunch(Executable* executable, Stream* stream) {
    if (current_device == atoi(variable("EMULATED_NO_GRAPHS", "-1").c_str())) return INVALID;
    auto start = std::make_shared<Mark>();
    stream->push([=] { start->reach(); });
    for (Stream* other : executable->others) other->push([=] { start->wait(); });
    std::vector<std::shared_ptr<Mark>> marks;
    for (long i = 0; i < executable->graph.events; i++) marks.push_back(std::make_shared<Mark>());
    for (const Capture::Step& step : executable->graph.steps) {
        Stream* on = step.line == 0 ? stream : executable->others[step.line - 1];
        if (step.reaches >= 0) {
            auto mark = marks[step.reaches];
            on->push([=] { mark->reach(); });
        } else if (step.waits >= 0) {
            auto mark = marks[step.waits];
            on->push([=] { mark->wait(); });
        } else {
            on->push(step.task);
        }
    }
    return 0;
}
// What runs goes on to its end.
API cuGraphExecDestroy(Executable* executable) {
    std::thread([=] { delete executable; }).detach();
    return 0;
}
API cuGraphDestroy(Graph* graph) {
    delete graph;
    return 0;
}

// ---- the compiler ----

struct Program {
    std::string source, name, log, path;
};

// What stands behind every kernel: its arguments are copied when it is queued, as the driver does.
static const char* BINDING = R"(
#include <memory>
template <class... P> struct Bound {
    void (*kernel)(P...);
    std::tuple<P...> values;
    void* pointers[sizeof...(P) + 1];
    template <size_t... I> void point(std::index_sequence<I...>) {
        void* all[] = {(void*)&std::get<I>(values)..., nullptr};
        memcpy(pointers, all, sizeof(all));
    }
    template <size_t... I>
    Bound(void (*kernel)(P...), void** from, std::index_sequence<I...> indices)
        : kernel(kernel), values(*(P*)from[I]...) {
        point(indices);
    }
};
template <class... P> std::shared_ptr<void> bind(void (*kernel)(P...), void** from) {
    return std::make_shared<Bound<P...>>(kernel, from, std::index_sequence_for<P...>());
}
template <class... P>
void run(void (*)(P...), void* bound, const unsigned* sizes, unsigned shared, unsigned mode) {
    auto* call = (Bound<P...>*)bound;
    emulator::launch(call->kernel, sizes, shared, call->pointers, mode);
}
)";

static bool shell(const std::string& command, std::string& said) {
    FILE* pipe = popen((command + " 2>&1").c_str(), "r");
    char part[4096];
    for (size_t n; (n = fread(part, 1, sizeof(part), pipe)) > 0;) said.append(part, n);
    return pclose(pipe) == 0;
}

API nvrtcVersion(int* major, int* minor) {
    *major = 0;
    *minor = 1;
    return 0;
}
API nvrtcCreateProgram(Program** program, const char* source, const char* name, int, const char**, const char**) {
    *program = new Program{source, name, "", ""};
    return 0;
}
API nvrtcDestroyProgram(Program** program) {
    delete *program;
    return 0;
}
static int built(Program* program, const std::string& stem, const std::string& text, const std::string& defines) {
    if (access(program->path.c_str(), R_OK) == 0) return 0;
    const std::string draft = stem + ".draft";
    std::string code = draft + ".cpp";
    std::ofstream(code) << text;
    std::string expanded;
    if (!shell("c++ -std=c++17 -E -P -w" + defines + " " + code, expanded)) {
        program->log = expanded;
        return 6;
    }
    std::regex kernel("static __attribute__\\(\\(unused\\)\\) void\\s+(\\w+)\\(");
    std::ofstream file(code, std::ios::app);
    for (std::sregex_iterator i(expanded.begin(), expanded.end(), kernel), end; i != end; ++i) {
        std::string name = (*i)[1];
        file << "extern \"C\" std::shared_ptr<void> bind_" << name << "(void** from) { return bind(" << name
             << ", from); }\nextern \"C\" void run_" << name
             << "(void* bound, const unsigned* sizes, unsigned shared, unsigned mode) { run(" << name
             << ", bound, sizes, shared, mode); }\n";
    }
    file.close();
    std::string flags = " -std=c++17 -O1 -fno-strict-aliasing -U_FORTIFY_SOURCE -w -shared -fPIC";
    if (!shell("c++" + flags + defines + " -o " + draft + " " + code, program->log)) return 6;
    rename(draft.c_str(), program->path.c_str());
    return 0;
}
API nvrtcCompileProgram(Program* program, int count, const char** options) {
    std::string defines;
    for (int i = 0; i < count; i++)
        if (!strncmp(options[i], "-D", 2)) defines += std::string(" ") + options[i];
    const std::string mark = "static __attribute__((unused)) void";
    std::string text = "#include \"" + variable("EMULATED_HEADER", "emulator.h") + "\"\n#undef KERNEL\n" +
                       "#undef BOUNDED_KERNEL\n#define KERNEL " + mark + "\n#define BOUNDED_KERNEL(threads) " + mark +
                       "\n" + program->source + BINDING;
    std::string folder = variable("EMULATED_FOLDER", "/tmp");
    std::string stem = folder + "/" + program->name + "-" + std::to_string(std::hash<std::string>()(text + defines));
    program->path = stem + ".so";
    // Who comes second waits for the first.
    int lock = open((stem + ".lock").c_str(), O_CREAT | O_RDWR, 0644);
    flock(lock, LOCK_EX);
    int result = built(program, stem, text, defines);
    close(lock);
    return result;
}
API nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return 0;
}
API nvrtcGetProgramLog(Program* program, char* log) {
    strcpy(log, program->log.c_str());
    return 0;
}
API nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->path.size() + 1;
    return 0;
}
API nvrtcGetCUBIN(Program* program, char* cubin) {
    strcpy(cubin, program->path.c_str());
    return 0;
}
