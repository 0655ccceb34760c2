// The exceptions of the data files' C++ side; Python sees them as megalite._C.DataError (a ValueError), WriteError and ShortageError
// (both a DataError).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

class DataError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

class WriteError : public DataError { // as of a full disk
  public:
    using DataError::DataError;
};

class ShortageError : public DataError { // of descriptors, mappings or memory: it says nothing of the file
  public:
    using DataError::DataError;
};

// Throws an Error whose message is all the parts joined.
template <typename Error = DataError, typename... Parts> [[noreturn]] void fail(const Parts &...parts) {
    std::ostringstream message;
    (message << ... << parts);
    throw Error(message.str());
}
