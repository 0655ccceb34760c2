// A whole file mapped read-only into memory; unmapped when its last owner goes.
//
// A process may have 65,530 mappings (vm.max_map_count) for all that it does, and a blend has up to 32,767 datasets of many files. So
// small files are read instead, up to a bound for the process, and too many are a ShortageError before the kernel says so: then
// everything fails that needs memory, a thread or a library.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <sys/types.h>

// Where a mapping lies, for the handler of SIGBUS; free for another when `end` is 0.
struct MappedRange {
    std::atomic<uintptr_t> begin{0}, end{0};
    std::atomic<bool> torn{false}; // pages that could not be read have become zeros
    MappedRange *next = nullptr, *next_free = nullptr;
};

// Makes the handler of SIGBUS ours again, in front of another that was put in its place since a file was mapped; where no other thread
// maps one meanwhile, as in a process that was just forked.
void handle_bus_errors();

class MappedFile {
  public:
    static constexpr uint64_t kSmall = 64 << 10;     // bytes of a file that is read
    static constexpr uint64_t kMostRead = 256 << 20; // bytes of all that are

    // Throws ShortageError where the system lacks something to open it with, DataError for what is wrong with the file.
    explicit MappedFile(const std::string &path);
    ~MappedFile();
    MappedFile(const MappedFile &) = delete;
    MappedFile &operator=(const MappedFile &) = delete;

    const uint8_t *data() const { return data_; }
    uint64_t size() const { return size_; }
    const std::string &path() const { return path_; }
    // After reading: throws when something that was read is not there. What was read since the file was mapped is good otherwise, but
    // for the end of a page in which the file ends now: that is for `check_size`.
    void check_read() const;
    // Before reading: throws for that, too, when the file has become shorter, and when it was written to and holds other bytes than at
    // the first time at its beginning, middle or end. A small one is a copy, which stays what it was and is not looked at; one that was
    // replaced by another of its name is still mapped whole. What was found good is not looked at again for 10 ms: it is a system call
    // for each file.
    void check_size() const;
    // Whether the file still has its name.
    bool has_name() const;

  private:
    void read(int descriptor);
    void map(int descriptor);
    [[noreturn]] void fail_of_cut(uint64_t left) const;
    uint64_t mark() const; // a hash of the bytes at the beginning, middle and end, not 0
    void check_mark(int64_t modified) const;

    std::string path_;
    std::unique_ptr<uint8_t[]> copy_; // of a small file
    const uint8_t *data_ = nullptr;
    uint64_t size_ = 0;
    dev_t device_ = 0;
    ino_t inode_ = 0;
    mutable std::atomic<uint64_t> mark_{0};    // 0 until something is read: of many files that would take long
    mutable std::atomic<int64_t> modified_{0}; // when the mark was found good, in nanoseconds of the file's clock
    MappedRange *range_ = nullptr;
    mutable std::atomic<int64_t> good_until_{0}; // in milliseconds of the steady clock
};
