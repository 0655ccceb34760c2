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
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "content_hash.h"
#include "data_error.h"

namespace {

std::atomic<MappedRange *> ranges{nullptr}; // the handler goes through them: added in front, used again, never freed
std::atomic<bool> passed_on{false};
std::mutex changing; // of the list and of the handler
struct sigaction before; // the handler that ours took the place of

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

// Makes ours the handler, also when something has put another in its place since.
void install_handler() {
    struct sigaction now;
    if (::sigaction(SIGBUS, nullptr, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error)) return;
    before = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    ::sigaction(SIGBUS, &ours, nullptr);
}

MappedRange *register_range(const void *address, uint64_t size) {
    const std::lock_guard<std::mutex> lock(changing);
    install_handler();
    MappedRange *range = ranges.load();
    while (range != nullptr && range->end.load() != 0) range = range->next;
    if (range == nullptr) {
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

} // namespace

MappedFile::MappedFile(const std::string &path) : path_(path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) fail(path, ": cannot be opened: ", std::strerror(errno));
    struct stat status;
    if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        ::close(descriptor);
        fail(path, ": expected a regular file");
    }
    size_ = static_cast<uint64_t>(status.st_size);
    device_ = status.st_dev;
    inode_ = status.st_ino;
    modified_ = modified_ns(status);
    if (size_ > 0) {
        void *address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
        const int error = errno;
        ::close(descriptor);
        if (address == MAP_FAILED) fail(path, ": cannot be mapped into memory: ", std::strerror(error));
        data_ = static_cast<const uint8_t *>(address);
        range_ = register_range(address, size_);
        mark_ = mark();
    } else {
        ::close(descriptor);
    }
}

MappedFile::~MappedFile() {
    if (data_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(changing);
    range_->end.store(0);
    ::munmap(const_cast<uint8_t *>(data_), size_);
}

uint64_t MappedFile::mark() const {
    const uint64_t bytes = std::min(size_, kMarked);
    const uint64_t starts[3] = {0, (size_ - bytes) / 2, size_ - bytes};
    uint64_t hash = 0;
    for (const uint64_t start : starts) hash = 3 * hash + content_hash(data_ + start, bytes);
    return hash;
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
    const int64_t now = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    if (now < good_until_.load(std::memory_order_relaxed)) return;
    struct stat status;
    const bool same = ::stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
    if (same && static_cast<uint64_t>(status.st_size) < size_)
        fail(path_, ": had ", size_, " bytes when it was opened and has ", status.st_size, " now: something cut it while it was in use");
    if (same && range_ != nullptr && modified_ns(status) != modified_.load(std::memory_order_relaxed)) {
        const bool good = mark() == mark_;
        check_read();
        if (!good) fail(path_, ": something wrote to it while it was in use: its bytes are not those with which it was opened");
        modified_.store(modified_ns(status), std::memory_order_relaxed); // it was touched, or has grown
    }
    good_until_.store(now + 10, std::memory_order_relaxed);
}
