// The texts under some keys of JSON lines, as most corpora have them: an object a line with a string under each key.
//
// Anything else is declined, valid or not, and left to a JSON library; what is accepted has the library's result. That saves the
// objects which a library makes of each line and of each value in it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// Of values that are passed over; far below the limits of the libraries, as nothing that they refuse may be accepted.
constexpr int kDeepest = 64;
constexpr ptrdiff_t kLongestNumber = 300;

struct Declined {};

typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint64_t Words __attribute__((vector_size(16), may_alias));

bool is_plain(uint8_t byte) { return byte >= 0x20 && byte != '"' && byte != '\\'; }

// How many bytes of `mask`, which is not 0, come before the first that is not 0.
int zeros_before(uint64_t mask) {
    return (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? __builtin_ctzll(mask) : __builtin_clzll(mask)) / 8;
}

// Where the first byte stands that is not plain, or `end`.
const uint8_t *skip_plain(const uint8_t *at, const uint8_t *end) {
    for (; end - at >= static_cast<ptrdiff_t>(sizeof(Bytes)); at += sizeof(Bytes)) {
        const Bytes &bytes = *reinterpret_cast<const Bytes *>(at);
        const auto found = (bytes < 0x20) | (bytes == '"') | (bytes == '\\');
        const Words words = reinterpret_cast<const Words &>(found);
        if (words[0] != 0) return at + zeros_before(words[0]);
        if (words[1] != 0) return at + 8 + zeros_before(words[1]);
    }
    while (at < end && is_plain(*at)) ++at;
    return at;
}

// Throws Declined for what is not UTF-8.
py::object to_python(std::string_view text) {
    PyObject *made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
    if (made == nullptr && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        throw Declined();
    }
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

void check_utf8(std::string_view text) {
    const bool ascii = std::none_of(text.begin(), text.end(), [](char byte) { return static_cast<uint8_t>(byte) >= 0x80; });
    if (!ascii) to_python(text);
}

// Reads the values of lines. Every function throws Declined for what it does not know.
class Reader {
  public:
    // `space` has room for as many bytes as there are from `begin` to `end`.
    Reader(const uint8_t *begin, const uint8_t *end, uint8_t *space) : at_(begin), end_(end), space_(space) {}

    bool at_end() const { return at_ == end_; }

    // Passes white space, but no line end, and `byte` where that is next; returns whether it was.
    bool take(uint8_t byte) {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
        return pass_byte(byte);
    }

    void expect(uint8_t byte) {
        if (!take(byte)) throw Declined();
    }

    void expect_line_end() {
        if (!take('\n') && !at_end()) throw Declined();
    }

    // The string that is next, its escapes resolved; valid until another is read.
    std::string_view string() {
        expect('"');
        const uint8_t *from = at_;
        at_ = skip_plain(at_, end_);
        if (pass_byte('"')) return {reinterpret_cast<const char *>(from), static_cast<size_t>(at_ - 1 - from)};
        uint8_t *to = space_;
        while (true) {
            std::memcpy(to, from, static_cast<size_t>(at_ - from));
            to += at_ - from;
            if (pass_byte('"')) return {reinterpret_cast<const char *>(space_), static_cast<size_t>(to - space_)};
            to = escape(to);
            from = at_;
            at_ = skip_plain(at_, end_);
        }
    }

    void pass_value(int depth = 0) {
        if (depth > kDeepest) throw Declined();
        if (take('{')) {
            if (take('}')) return;
            do {
                pass_string();
                expect(':');
                pass_value(depth + 1);
            } while (take(','));
            expect('}');
        } else if (take('[')) {
            if (take(']')) return;
            do pass_value(depth + 1);
            while (take(','));
            expect(']');
        } else if (at_ < end_ && *at_ == '"') {
            pass_string();
        } else if (!pass_word("true") && !pass_word("false") && !pass_word("null")) {
            pass_number();
        }
    }

  private:
    void pass_string() { check_utf8(string()); }

    bool pass_word(std::string_view word) {
        const size_t left = static_cast<size_t>(end_ - at_);
        if (left < word.size() || std::memcmp(at_, word.data(), word.size()) != 0) return false;
        at_ += word.size();
        return true;
    }

    bool pass_byte(uint8_t byte) {
        if (at_ == end_ || *at_ != byte) return false;
        ++at_;
        return true;
    }

    void pass_digits() {
        const uint8_t *from = at_;
        while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
        if (at_ == from) throw Declined();
    }

    void pass_number() {
        const uint8_t *from = at_;
        pass_byte('-');
        if (!pass_byte('0')) pass_digits();
        if (pass_byte('.')) pass_digits();
        if (pass_byte('e') || pass_byte('E')) {
            if (!pass_byte('+')) pass_byte('-');
            pass_digits();
        }
        if (at_ - from > kLongestNumber) throw Declined();
    }

    // The code unit in four hexadecimal digits.
    uint32_t unit() {
        if (end_ - at_ < 4) throw Declined();
        uint32_t value = 0;
        for (int i = 0; i < 4; ++i, ++at_) {
            const uint8_t byte = *at_, letter = byte | 0x20;
            if (byte >= '0' && byte <= '9') value = 16 * value + (byte - '0');
            else if (letter >= 'a' && letter <= 'f') value = 16 * value + (letter - 'a' + 10);
            else throw Declined();
        }
        return value;
    }

    // Passes an escape and writes the UTF-8 of what it stands for, which is shorter, to `to`; returns its end.
    uint8_t *escape(uint8_t *to) {
        static constexpr std::string_view names = "\"\\/bfnrt", bytes = "\"\\/\b\f\n\r\t";
        if (!pass_byte('\\') || at_ == end_) throw Declined(); // a control character, or no end
        const uint8_t name = *at_++;
        if (name != 'u') {
            const size_t place = names.find(static_cast<char>(name));
            if (place == names.npos) throw Declined();
            *to = static_cast<uint8_t>(bytes[place]);
            return to + 1;
        }
        uint32_t point = unit();
        if (point >= 0xd800 && point < 0xe000) { // a surrogate: the first of two
            if (point >= 0xdc00 || !pass_byte('\\') || !pass_byte('u')) throw Declined();
            const uint32_t second = unit();
            if (second < 0xdc00 || second >= 0xe000) throw Declined();
            point = 0x10000 + ((point - 0xd800) << 10) + (second - 0xdc00);
        }
        if (point < 0x80) {
            *to = static_cast<uint8_t>(point);
            return to + 1;
        }
        const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3; // bytes behind the first
        static constexpr uint8_t first[] = {0, 0xc0, 0xe0, 0xf0};
        to[0] = static_cast<uint8_t>(first[more] | point >> 6 * more);
        for (int i = 1; i <= more; ++i) to[i] = static_cast<uint8_t>(0x80 | (point >> 6 * (more - i) & 0x3f));
        return to + 1 + more;
    }

    const uint8_t *at_;
    const uint8_t *end_;
    uint8_t *space_;
};

// The strings under `keys` in the object that `reader` reads; of a key that is there twice the last.
void read_object(Reader &reader, const std::vector<std::string> &keys, std::vector<py::object> &found) {
    reader.expect('{');
    do {
        const std::string_view name = reader.string();
        check_utf8(name);
        const size_t key = static_cast<size_t>(std::find(keys.begin(), keys.end(), name) - keys.begin());
        reader.expect(':');
        if (key == keys.size()) reader.pass_value();
        else found[key] = to_python(reader.string());
    } while (reader.take(','));
    reader.expect('}');
    reader.expect_line_end();
}

// Bytes of Python's, kept as long as this stands.
class Contents {
  public:
    explicit Contents(const py::buffer &object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    }
    ~Contents() { PyBuffer_Release(&buffer_); }
    Contents(const Contents &) = delete;
    Contents &operator=(const Contents &) = delete;

    const uint8_t *begin() const { return static_cast<const uint8_t *>(buffer_.buf); }
    const uint8_t *end() const { return begin() + buffer_.len; }
    size_t size() const { return static_cast<size_t>(buffer_.len); }

  private:
    Py_buffer buffer_;
};

std::optional<std::vector<py::list>> texts_of_lines(const py::buffer &block, const std::vector<std::string> &keys) {
    const Contents content(block);
    const std::unique_ptr<uint8_t[]> space(new uint8_t[content.size()]);
    Reader reader(content.begin(), content.end(), space.get());
    std::vector<py::list> texts(keys.size());
    std::vector<py::object> found(keys.size());
    try {
        while (!reader.at_end()) {
            read_object(reader, keys, found);
            for (size_t i = 0; i < keys.size(); ++i) {
                if (!found[i]) throw Declined();
                texts[i].append(std::exchange(found[i], py::object()));
            }
        }
    } catch (const Declined &) {
        return std::nullopt;
    }
    return texts;
}

const uint8_t *line_end(const uint8_t *at, const uint8_t *end) {
    const void *found = std::memchr(at, '\n', static_cast<size_t>(end - at));
    return found == nullptr ? end : static_cast<const uint8_t *>(found) + 1;
}

// Where in `block` the lines from byte `start` on end when they are to be at most `most`, and to begin before byte `until`;
// and how many there are.
std::pair<int64_t, int64_t> lines_within(const py::buffer &block, int64_t start, int64_t most, int64_t until) {
    const Contents content(block);
    const uint8_t *begin = content.begin(), *end = content.end();
    const uint8_t *at = begin + std::clamp<int64_t>(start, 0, end - begin);
    int64_t count = 0;
    for (; count < most && at < end && at - begin < until; ++count) at = line_end(at, end);
    return {at - begin, count};
}

// How many bytes of `piece` there are up to its first and to its last line end, those included; 0 where it has none.
std::pair<int64_t, int64_t> line_ends(const py::buffer &piece) {
    const Contents content(piece);
    const uint8_t *begin = content.begin(), *end = content.end();
    while (end > begin && end[-1] != '\n') --end;
    return {end == begin ? 0 : line_end(begin, end) - begin, end - begin};
}

} // namespace

void bind_json_lines(py::module_ &module) {
    module.def("texts_of_lines", &texts_of_lines, py::arg("block"), py::arg("keys"),
               "For each of `keys` the list of the strings under it in the JSON lines `block`; None unless each line is a valid object "
               "with a string under each.");
    module.def("lines_within", &lines_within, py::arg("block"), py::arg("start"), py::arg("most"), py::arg("until"),
               "Where in `block` the lines from byte `start` on end, at most `most` that begin before byte `until`; how many they are.");
    module.def("line_ends", &line_ends, py::arg("piece"),
               "How many bytes of `piece` there are up to its first and to its last line end, those included; 0 where it has none.");
}
