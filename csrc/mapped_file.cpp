// Memory mapped from files that may become shorter, or fail to be read, while it is in use; see mapped_file.h.
//
// The kernel tells of a page that is no longer there by SIGBUS, which would end the process. The handler here puts zeros in the
// place of the pages that are gone and marks the mapping as torn; whoever reads asks for the mark afterwards and throws. A SIGBUS of
// any other memory goes on to the handler that was there before.
#include "mapped_file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <limits>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "content_hash.h"
#include "data_error.h"

namespace {

std::atomic<MappedRange *> ranges{nullptr}; // the handler goes through them: added in front, used again, never freed
std::atomic<bool> passed_on{false};
MappedRange *unused = nullptr; // of them, by `next_free`
std::mutex changing;           // of the lists and of the handler
struct sigaction before; // the handler that ours took the place of
std::atomic<int64_t> mapped{0};      // files
std::atomic<uint64_t> bytes_read{0}; // of the small files that are open

void pass_on(int signal, siginfo_t *info, void *context) {
    if (passed_on.exchange(true) || before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN)
        ::signal(signal, SIG_DFL); // the access is tried again, and ends the process
    else if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, info, context);
    else
        before.sa_handler(signal);
}

void on_bus_error(int signal, siginfo_t *info, void *context) {
    const int error = errno;
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    for (MappedRange *range = ranges.load(); range != nullptr; range = range->next) {
        const uintptr_t begin = range->begin.load(), end = range->end.load();
        if (address < begin || address >= end) continue;
        // All from here on at once: a page at a time could be more mappings than a process may have.
        const uintptr_t page = address & ~(static_cast<uintptr_t>(::getpagesize()) - 1);
        void *zeros = ::mmap(reinterpret_cast<void *>(page), end - page, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (zeros == MAP_FAILED) break;
        range->torn.store(true);
        errno = error;
        return;
    }
    pass_on(signal, info, context);
}

MappedRange *register_range(const void *address, uint64_t size) {
    const std::lock_guard<std::mutex> lock(changing);
    handle_bus_errors();
    MappedRange *range = unused;
    if (range != nullptr) {
        unused = range->next_free;
    } else {
        range = new MappedRange;
        range->next = ranges.load();
        ranges.store(range);
    }
    range->torn.store(false);
    range->begin.store(reinterpret_cast<uintptr_t>(address));
    range->end.store(reinterpret_cast<uintptr_t>(address) + size);
    return range;
}

constexpr uint64_t kMarked = 512; // bytes at each of three places: a page or two

int64_t modified_ns(const struct stat &status) {
#ifdef __APPLE__
    const timespec &time = status.st_mtimespec;
#else
    const timespec &time = status.st_mtim;
#endif
    return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// How many mappings the kernel allows this process; no limit where it does not say.
int64_t mapping_limit() {
    static const int64_t limit = [] {
        int64_t count = std::numeric_limits<int64_t>::max();
        std::ifstream("/proc/sys/vm/max_map_count") >> count;
        return count > 0 ? count : std::numeric_limits<int64_t>::max();
    }();
    return limit;
}

// An eighth is left to libraries, threads and the device's driver.
int64_t most_mapped() { return mapping_limit() / 8 * 7; }

struct Descriptor {
    int number;
    ~Descriptor() { ::close(number); }
};

[[noreturn]] void fail_to_open(const std::string &path, int error) {
    const char *reason = std::strerror(error);
    if (error == EMFILE) fail<ShortageError>(path, ": cannot be opened: ", reason, " for this process (ulimit -n)");
    if (error == ENFILE || error == ENOMEM) fail<ShortageError>(path, ": cannot be opened: ", reason);
    fail(path, ": cannot be opened: ", reason);
}

[[noreturn]] void fail_to_map(const std::string &path, int error) {
    if (error != ENOMEM) fail(path, ": cannot be mapped into memory: ", std::strerror(error));
    const int64_t files = mapped.load();
    if (files < most_mapped())
        fail<ShortageError>(path, ": cannot be mapped into memory beside ", files, " other files: ", std::strerror(error),
                            " (ulimit -v, or vm.max_map_count)");
    fail<ShortageError>(path, ": cannot be mapped into memory beside ", files, " other files: this system allows a process ",
                        mapping_limit(), " mappings; allow more (as root: sysctl -w vm.max_map_count=", 4 * mapping_limit(),
                        "), or merge datasets of the blend (tools/merge_datasets.py)");
}

} // namespace

void handle_bus_errors() {
    struct sigaction now;
    if (::sigaction(SIGBUS, nullptr, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error)) return;
    before = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    ::sigaction(SIGBUS, &ours, nullptr);
}

MappedFile::MappedFile(const std::string &path) : path_(path) {
    const Descriptor descriptor{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
    if (descriptor.number < 0) fail_to_open(path, errno);
    struct stat status;
    if (::fstat(descriptor.number, &status) != 0 || !S_ISREG(status.st_mode)) fail(path, ": expected a regular file");
    size_ = static_cast<uint64_t>(status.st_size);
    device_ = status.st_dev;
    inode_ = status.st_ino;
    if (size_ == 0) return;
    if (size_ <= kSmall && bytes_read.load() + size_ <= kMostRead) read(descriptor.number);
    else map(descriptor.number);
}

MappedFile::~MappedFile() {
    if (copy_ != nullptr) bytes_read.fetch_sub(size_);
    if (range_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(changing);
    range_->end.store(0);
    range_->next_free = unused;
    unused = range_;
    ::munmap(const_cast<uint8_t *>(data_), size_);
    mapped.fetch_sub(1);
}

void MappedFile::read(int descriptor) {
    auto copy = std::make_unique<uint8_t[]>(size_);
    for (uint64_t done = 0; done < size_;) {
        const ssize_t count = ::pread(descriptor, copy.get() + done, size_ - done, static_cast<off_t>(done));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) fail(path_, ": cannot be read: ", std::strerror(errno));
        if (count == 0) fail_of_cut(done);
        done += static_cast<uint64_t>(count);
    }
    data_ = copy.get();
    copy_ = std::move(copy);
    bytes_read.fetch_add(size_);
}

void MappedFile::map(int descriptor) {
    if (mapped.load() >= most_mapped()) fail_to_map(path_, ENOMEM);
    void *address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) fail_to_map(path_, errno);
    mapped.fetch_add(1);
    data_ = static_cast<const uint8_t *>(address);
    range_ = register_range(address, size_);
}

void MappedFile::fail_of_cut(uint64_t left) const {
    fail(path_, ": had ", size_, " bytes when it was opened and has ", left, " now: something cut it while it was in use");
}

uint64_t MappedFile::mark() const {
    const uint64_t bytes = std::min(size_, kMarked);
    const uint64_t starts[3] = {0, (size_ - bytes) / 2, size_ - bytes};
    uint64_t hash = 0;
    for (const uint64_t start : starts) hash = 3 * hash + content_hash(data_ + start, bytes);
    return hash | 1;
}

void MappedFile::check_mark(int64_t modified) const {
    const uint64_t known = mark_.load(std::memory_order_relaxed);
    if (known != 0 && modified == modified_.load(std::memory_order_relaxed)) return;
    const uint64_t now = mark();
    check_read();
    if (known != 0 && now != known)
        fail(path_, ": something wrote to it while it was in use: its bytes are not those that were read first");
    mark_.store(now, std::memory_order_relaxed);
    modified_.store(modified, std::memory_order_relaxed); // it was touched, or has grown
}

void MappedFile::check_read() const {
    if (range_ != nullptr && range_->torn.load(std::memory_order_relaxed))
        fail(path_, ": a part of it could not be read: something cut it while it was in use, or its disk failed");
}

bool MappedFile::has_name() const {
    struct stat status;
    return ::stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
}

void MappedFile::check_size() const {
    check_read();
    if (range_ == nullptr) return; // a copy; another file may have the number of the one that it is of
    const int64_t now = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    if (now < good_until_.load(std::memory_order_relaxed)) return;
    struct stat status;
    const bool same = ::stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
    if (same && static_cast<uint64_t>(status.st_size) < size_)
        fail_of_cut(static_cast<uint64_t>(status.st_size));
    if (same) check_mark(modified_ns(status));
    good_until_.store(now + 10, std::memory_order_relaxed);
}
