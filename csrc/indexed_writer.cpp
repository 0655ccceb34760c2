// Streaming writer of Megatron's indexed dataset; see indexed_writer.h.
#include "indexed_writer.h"

#include "crc32.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

OutputFile::OutputFile(const std::string &path, int64_t keep) : path_(path), buffer_(kCapacity) {
    while (true) {
        descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (keep < 0 ? O_CREAT : 0), 0666);
        if (descriptor_ < 0) fail(path, ": cannot be opened for writing: ", std::strerror(errno));
        if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) { // some file systems have no locks
            ::close(descriptor_);
            fail(path, ": another process is writing this output");
        }
        // Another may have given it its final name between the two calls: what is that must not be cut.
        if (has_its_name()) break;
        ::close(descriptor_);
    }
    if (keep < 0) keep = 0;
    if (const off_t size = ::lseek(descriptor_, 0, SEEK_END); size < keep) {
        ::close(descriptor_);
        fail(path, ": expected at least the ", keep, " bytes of the interrupted run, found ", size);
    }
    if (::ftruncate(descriptor_, keep) != 0 || ::lseek(descriptor_, keep, SEEK_SET) != keep) {
        ::close(descriptor_);
        fail(path, ": cannot be cut to ", keep, " bytes: ", std::strerror(errno));
    }
}

OutputFile::~OutputFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

uint8_t *OutputFile::reserve(uint64_t bytes) {
    if (used_ + bytes > kCapacity) flush(false);
    return buffer_.data() + used_;
}

void OutputFile::write(const void *data, uint64_t bytes) {
    if (bytes >= kCapacity / 4) { // not worth a copy
        flush(false);
        return write_out(static_cast<const uint8_t *>(data), bytes);
    }
    std::memcpy(reserve(bytes), data, bytes);
    commit(bytes);
}

void OutputFile::write_out(const uint8_t *data, uint64_t bytes) {
    if (checksummed_) checksum_ = crc32(checksum_, data, bytes);
    while (bytes > 0) {
        const ssize_t written = ::write(descriptor_, data, bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) fail<WriteError>(path_, ": cannot be written: ", std::strerror(errno));
        data += written;
        bytes -= static_cast<uint64_t>(written);
    }
}

void OutputFile::flush(bool sync) {
    const uint64_t bytes = used_;
    used_ = 0;
    write_out(buffer_.data(), bytes);
    if (sync && ::fsync(descriptor_) != 0) fail<WriteError>(path_, ": cannot be synced to disk: ", std::strerror(errno));
}

void OutputFile::write_at(uint64_t position, const void *data, uint64_t bytes) {
    if (::pwrite(descriptor_, data, bytes, static_cast<off_t>(position)) != static_cast<ssize_t>(bytes))
        fail<WriteError>(path_, ": cannot be written: ", std::strerror(errno));
}

void OutputFile::read_at(uint64_t position, void *data, uint64_t bytes) const {
    uint8_t *target = static_cast<uint8_t *>(data);
    while (bytes > 0) {
        const ssize_t got = ::pread(descriptor_, target, bytes, static_cast<off_t>(position));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) fail(path_, ": cannot be read back: ", got == 0 ? "it has become shorter" : std::strerror(errno));
        target += got;
        position += static_cast<uint64_t>(got);
        bytes -= static_cast<uint64_t>(got);
    }
}

bool OutputFile::has_its_name() const {
    struct stat own, named;
    if (::fstat(descriptor_, &own) != 0 || ::stat(path_.c_str(), &named) != 0) return false;
    errno = 0;
    return own.st_ino == named.st_ino && own.st_dev == named.st_dev;
}

bool OutputFile::is_replaced() const { return !has_its_name() && (errno == 0 || errno == ENOENT); }

void OutputFile::check_name() const {
    if (has_its_name()) return;
    const std::string reason = errno == 0 || errno == ENOENT ? "" : std::string(" (") + std::strerror(errno) + ")";
    fail(path_, ": was removed or replaced while it was written", reason, "; give the same command again");
}

void OutputFile::close() {
    if (descriptor_ >= 0 && ::close(descriptor_) != 0) {
        descriptor_ = -1;
        fail<WriteError>(path_, ": cannot be closed: ", std::strerror(errno));
    }
    descriptor_ = -1;
}

namespace {

int64_t kept(const WriterState *resume, int64_t bytes) { return resume == nullptr ? -1 : bytes; }

} // namespace

IndexedWriter::IndexedWriter(const std::string &prefix, const std::string &dtype, const WriterState *resume)
    : prefix_(prefix), type_(token_type(dtype)), state_(resume == nullptr ? WriterState() : *resume),
      boundaries_(partial(prefix + ".boundaries"), kept(resume, 8 * state_.documents)),
      bin_(partial(prefix + ".bin"), kept(resume, state_.tokens * static_cast<int64_t>(type_.bytes))),
      idx_(partial(prefix + ".idx"), kept(resume, static_cast<int64_t>(kHeaderBytes) + 4 * state_.sequences)) {
    bin_.keep_checksum(state_.checksum);
    if (resume == nullptr) {
        const uint8_t place[kHeaderBytes] = {};
        idx_.write(place, kHeaderBytes);
    } else if (state_.documents > 0) {
        boundaries_.read_at(8 * static_cast<uint64_t>(state_.documents - 1), &boundary_, 8);
    }
}

void IndexedWriter::add_tokens(const void *tokens, uint64_t count) {
    check_open();
    bin_.write(tokens, count * type_.bytes);
    state_.tokens += static_cast<int64_t>(count);
}

void IndexedWriter::add_sequences(const int32_t *lengths, uint64_t count) {
    check_open();
    idx_.write(lengths, 4 * count);
    state_.sequences += static_cast<int64_t>(count);
}

void IndexedWriter::add_documents(const int64_t *sequences_each, uint64_t count) {
    check_open();
    for (uint64_t i = 0; i < count; ++i) {
        boundary_ += sequences_each[i];
        boundaries_.write(&boundary_, 8);
    }
    state_.documents += static_cast<int64_t>(count);
}

void IndexedWriter::check_names() const {
    for (const OutputFile *file : {&boundaries_, &bin_, &idx_}) file->check_name();
}

void IndexedWriter::flush(bool sync) {
    bin_.flush(sync);
    idx_.flush(sync);
    boundaries_.flush(sync);
    state_.checksum = bin_.checksum();
    check_names();
}

void IndexedWriter::complete(bool sync) {
    if (complete_) return;
    flush(false);
    const uint64_t sequences = static_cast<uint64_t>(state_.sequences), documents = static_cast<uint64_t>(state_.documents);
    if (boundary_ != state_.sequences)
        fail(prefix_, ": its documents hold ", boundary_, " sequences, but ", state_.sequences, " were written");
    constexpr uint64_t kChunk = 1 << 15;
    std::vector<int32_t> lengths(kChunk);
    std::vector<int64_t> numbers(kChunk);
    int64_t offset = 0;
    for (uint64_t first = 0; first < sequences; first += kChunk) {
        const uint64_t count = std::min(kChunk, sequences - first);
        idx_.read_at(kHeaderBytes + 4 * first, lengths.data(), 4 * count);
        for (uint64_t i = 0; i < count; ++i) {
            numbers[i] = offset;
            offset += static_cast<int64_t>(lengths[i]) * static_cast<int64_t>(type_.bytes);
        }
        idx_.write(numbers.data(), 8 * count);
    }
    if (offset != state_.tokens * static_cast<int64_t>(type_.bytes))
        fail(prefix_, ": its sequences hold ", offset / static_cast<int64_t>(type_.bytes), " tokens, but ", state_.tokens, " were written");
    const int64_t start = 0;
    idx_.write(&start, 8);
    for (uint64_t first = 0; first < documents; first += kChunk) {
        const uint64_t count = std::min(kChunk, documents - first);
        boundaries_.read_at(8 * first, numbers.data(), 8 * count);
        idx_.write(numbers.data(), 8 * count);
    }
    idx_.flush(false);

    uint8_t header[kHeaderBytes];
    const uint64_t entries = documents + 1;
    std::memcpy(header, kMagic, sizeof(kMagic));
    std::memcpy(header + 9, &kVersion, 8);
    header[17] = static_cast<uint8_t>(type_.code);
    std::memcpy(header + 18, &sequences, 8);
    std::memcpy(header + 26, &entries, 8);
    idx_.write_at(0, header, kHeaderBytes);
    bin_.flush(sync);
    idx_.flush(sync);
    check_names();
    complete_ = true;
}

void IndexedWriter::name(const std::string &suffix) const {
    const std::string path = prefix_ + suffix;
    if (std::rename(partial(path).c_str(), path.c_str()) != 0)
        fail(path, ": cannot be given its final name: ", std::strerror(errno));
}

void IndexedWriter::publish(bool described) {
    if (!complete_) fail(prefix_, ": published before it is complete");
    check_names(); // without file locks another run may have written since what this one would take away
    const std::string description = prefix_ + ".json"; // of what is replaced
    if (std::remove(description.c_str()) != 0 && errno != ENOENT)
        fail<WriteError>(description, ": cannot be removed: ", std::strerror(errno));
    bin_.close();
    idx_.close();
    std::remove((prefix_ + ".idx").c_str()); // or a kill in between would leave an earlier index beside the new tokens
    name(".bin");
    if (described) name(".json");
    name(".idx"); // the last: without it there is no dataset
    // Without common locks another run may have begun meanwhile, and these be its own: they stay, as they may be whole. It takes
    // the boundaries' name first, and that file is open: others may have another number under each name, as on gcsfuse.
    if (boundaries_.is_replaced()) boundaries_.check_name();
    std::remove(boundaries_.path().c_str());
    boundaries_.close(); // it was opened first, so that until here its lock kept others from all three
}
