// Memory from the operating system: reserved at once, committed when first touched.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace pagoda {

class Mapping {
 public:
  explicit Mapping(size_t num_bytes, bool huge_pages) : num_bytes_(num_bytes) {
    if (num_bytes == 0) return;
    void* p = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(p);
#ifdef MADV_HUGEPAGE
    madvise(p, num_bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  }
  Mapping(Mapping&& other) noexcept : data_(other.data_), num_bytes_(other.num_bytes_) { other.data_ = nullptr; }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  ~Mapping() {
    if (data_) munmap(data_, num_bytes_);
  }
  uint8_t* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t num_bytes_ = 0;
};

// Bump allocation for weights, which live as long as the model. Huge pages: decoding streams all of it.
class Arena {
 public:
  uint8_t* allocate(size_t num_bytes) {
    num_bytes = (num_bytes + 63) / 64 * 64;
    if (chunks_.empty() || used_ + num_bytes > chunks_.back().num_bytes()) {
      chunks_.emplace_back(num_bytes > CHUNK_BYTES ? num_bytes : CHUNK_BYTES, true);
      used_ = 0;
    }
    uint8_t* p = chunks_.back().data() + used_;
    used_ += num_bytes;
    total_ += num_bytes;
    return p;
  }
  size_t num_bytes() const { return total_; }

 private:
  static constexpr size_t CHUNK_BYTES = size_t{64} << 20;
  std::vector<Mapping> chunks_;
  size_t used_ = 0, total_ = 0;
};

}  // namespace pagoda
