// A whole file mapped read-only into memory; unmapped when its last owner goes.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data_error.h"

class MappedFile {
  public:
    explicit MappedFile(const std::string &path) : path_(path) {
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
        if (size_ > 0) {
            void *address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
            const int error = errno;
            ::close(descriptor);
            if (address == MAP_FAILED) fail(path, ": cannot be mapped into memory: ", std::strerror(error));
            data_ = static_cast<const uint8_t *>(address);
        } else {
            ::close(descriptor);
        }
    }
    ~MappedFile() {
        if (data_ != nullptr) ::munmap(const_cast<uint8_t *>(data_), size_);
    }
    MappedFile(const MappedFile &) = delete;
    MappedFile &operator=(const MappedFile &) = delete;

    const uint8_t *data() const { return data_; }
    uint64_t size() const { return size_; }
    // Throws when the file has become shorter: touching what is gone would be a SIGBUS. One that was replaced by another of its
    // name is still mapped whole. What was found good is not looked at again for 10 ms: it is a system call for each file.
    void check_size() const {
        const int64_t now = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
        if (now < good_until_.load(std::memory_order_relaxed)) return;
        struct stat status;
        const bool same = ::stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
        if (same && static_cast<uint64_t>(status.st_size) < size_)
            fail(path_, ": had ", size_, " bytes when it was opened and has ", status.st_size, " now: something cut it while it was in use");
        good_until_.store(now + 10, std::memory_order_relaxed);
    }
    const std::string &path() const { return path_; }

  private:
    std::string path_;
    const uint8_t *data_ = nullptr;
    uint64_t size_ = 0;
    dev_t device_ = 0;
    ino_t inode_ = 0;
    mutable std::atomic<int64_t> good_until_{0}; // in milliseconds of the steady clock
};
