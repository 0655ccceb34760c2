// The one exception of the data files' C++ side; Python sees it as megalite._C.DataError (a ValueError).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

class DataError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Throws a DataError whose message is all the parts joined.
template <typename... Parts> [[noreturn]] void fail(const Parts &...parts) {
    std::ostringstream message;
    (message << ... << parts);
    throw DataError(message.str());
}
