// Which dataset gives sample i of a blend; see blend_order.h.
//
// Built with -ffp-contract=off: a fused multiply-subtract would round differently from Megatron-LM.
#include "blend_order.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "vector_clones.h"

namespace {

#define MEGALITE_INLINED __attribute__((always_inline)) // into functions built for several vector widths
#define MEGALITE_INLINE inline MEGALITE_INLINED

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFew = 24;                // up to here comparing all is faster than keeping blocks
constexpr int64_t kSmall = 16, kLarge = 32; // members of a block
constexpr int64_t kManyDatasets = 1100;     // from here on large blocks, or the leaders are too many

// Compilers vectorise searches by detours through memory; with the vectors spelled out they take 3/4 of the time.
typedef double Vector __attribute__((vector_size(MEGALITE_VECTOR_BYTES), aligned(8), may_alias));
constexpr size_t kLanes = sizeof(Vector) / sizeof(double);
alignas(64) const double kOne[] = {0, 0, 0, 1, 0, 0, 0}; // from 3 - k on a vector with its 1 in lane k
const Vector kNever = Vector{} + kInfinity;

MEGALITE_INLINE const Vector *vectors(const std::vector<double> &values) { return reinterpret_cast<const Vector *>(values.data()); }
MEGALITE_INLINE Vector *vectors(std::vector<double> &values) { return reinterpret_cast<Vector *>(values.data()); }

MEGALITE_INLINE const Vector &one_in(size_t lane) { return *reinterpret_cast<const Vector *>(kOne + 3 - lane); }

// Writes that keep to whole vectors: a vector read soon after a narrower write would wait until that is in the cache.
MEGALITE_INLINE void add_one(std::vector<double> &values, size_t i) { vectors(values)[i / kLanes] += one_in(i % kLanes); }
MEGALITE_INLINE void set(std::vector<double> &values, size_t i, double value) {
    Vector &vector = vectors(values)[i / kLanes];
    vector = one_in(i % kLanes) != 0.0 ? Vector{} + value : vector;
}

MEGALITE_INLINE void keep_greater(Vector &most, const Vector &value) { most = value > most ? value : most; }
MEGALITE_INLINE void keep_lesser(Vector &least, const Vector &value) { least = value < least ? value : least; }
MEGALITE_INLINE double greatest(const Vector &values) {
    double most = values[0];
    for (size_t k = 1; k < kLanes; ++k) most = values[k] > most ? values[k] : most;
    return most;
}
MEGALITE_INLINE double least(const Vector &values) {
    double least = values[0];
    for (size_t k = 1; k < kLanes; ++k) least = values[k] < least ? values[k] : least;
    return least;
}

struct Lead {
    double lag;     // the largest
    double dataset; // the lowest that has it
};

// Among the lags that `compute(i, lag[i])` writes, `size` vectors, a multiple of 4: four maxima grow side by side, as each waits
// for the step before.
template <typename Compute> MEGALITE_INLINE Lead find_lead(Vector *lag, const Vector *dataset, size_t size, const Compute &compute) {
    Vector most[4] = {-kNever, -kNever, -kNever, -kNever}, first[4] = {kNever, kNever, kNever, kNever};
    for (size_t i = 0; i < size; i += 4) {
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; ++k) {
            compute(i + k, lag[i + k]);
            keep_greater(most[k], lag[i + k]);
        }
    }
    keep_greater(most[0], most[1]);
    keep_greater(most[2], most[3]);
    keep_greater(most[0], most[2]);
    const double largest = greatest(most[0]);
    for (size_t i = 0; i < size; i += 4) {
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; ++k) keep_lesser(first[k], lag[i + k] == largest ? dataset[i + k] : kNever);
    }
    keep_lesser(first[0], first[1]);
    keep_lesser(first[2], first[3]);
    keep_lesser(first[0], first[2]);
    return {largest, least(first[0])};
}

} // namespace

BlendOrder::BlendOrder(const double *weights, int64_t datasets)
    : block_(datasets < kManyDatasets ? kSmall : kLarge), counts_(static_cast<size_t>(datasets), 0),
      member_of_(static_cast<size_t>(datasets)) {
    std::vector<int32_t> order(static_cast<size_t>(datasets));
    std::iota(order.begin(), order.end(), 0);
    if (datasets > kFew)
        std::stable_sort(order.begin(), order.end(), [weights](int32_t a, int32_t b) { return weights[a] > weights[b]; });
    for (const int32_t dataset : order) {
        member_of_[static_cast<size_t>(dataset)] = static_cast<int32_t>(weight_.size());
        weight_.push_back(weights[dataset]);
        given_.push_back(0.0);
        dataset_.push_back(static_cast<double>(dataset));
    }
    if (datasets <= kFew) return;
    const size_t size = static_cast<size_t>(block_), step = static_cast<size_t>(kSmall);
    while (weight_.size() % size != 0) {
        weight_.push_back(0.0);
        given_.push_back(kInfinity);
        dataset_.push_back(kInfinity);
    }
    const size_t blocks = weight_.size() / size, padded = (blocks + step - 1) / step * step;
    leader_weight_.assign(padded, 0.0);
    leader_given_.assign(padded, kInfinity);
    leader_dataset_.assign(padded, kInfinity);
    leader_lag_.assign(padded, -kInfinity);
    valid_until_.assign(blocks, 0);
}

int64_t BlendOrder::next_of_few(double progress) {
    double most = -kInfinity;
    size_t chosen = 0;
    for (size_t i = 0; i < weight_.size(); ++i) {
        const double lag = weight_[i] * progress - given_[i];
        if (lag > most) {
            most = lag;
            chosen = i;
        }
    }
    given_[chosen] += 1;
    return static_cast<int64_t>(chosen); // few datasets are not reordered
}

template <int64_t kBlock> MEGALITE_INLINE double BlendOrder::find_leader(size_t block, double progress) {
    constexpr size_t kSize = kBlock / kLanes;
    const Vector *weight = vectors(weight_) + block * kSize, *given = vectors(given_) + block * kSize;
    Vector lag[kSize];
    const auto compute = [=](size_t i, Vector &out) MEGALITE_INLINED { out = weight[i] * progress - given[i]; };
    const Lead lead = find_lead(lag, vectors(dataset_) + block * kSize, kSize, compute);
    if (lead.lag == -kInfinity) { // all retired
        set(leader_given_, block, kInfinity);
        set(leader_dataset_, block, kInfinity);
        valid_until_[block] = std::numeric_limits<int64_t>::max();
        return lead.lag;
    }
    const size_t leader = static_cast<size_t>(member_of_[static_cast<size_t>(lead.dataset)]);
    const double own = weight_[leader], heaviest = weight_[block * kBlock];
    set(leader_weight_, block, own);
    set(leader_given_, block, given_[leader]);
    set(leader_dataset_, block, lead.dataset);

    // Members with more weight than the leader catch up in margin / faster steps; those of equal weight keep their distance
    // exactly; those with less fall behind, but one within the rounding errors must be watched. The errors are bounded for twice
    // the present progress, so the promise is not made for longer than that.
    const double error = 16 * std::numeric_limits<double>::epsilon() * (heaviest * progress + 1);
    Vector steps = kNever;
#pragma GCC unroll 8
    for (size_t i = 0; i < kSize; ++i) {
        const Vector margin = lead.lag - error - lag[i], faster = weight[i] - own;
        const Vector watched = (faster < 0.0) & (margin <= 0.0) ? Vector{} : kNever;
        keep_lesser(steps, faster > 0.0 ? margin / faster : watched);
    }
    valid_until_[block] = sample_ + static_cast<int64_t>(std::max(std::min(least(steps), progress), 1.0));
    return lead.lag;
}

template <int64_t kBlock> MEGALITE_VECTOR int64_t BlendOrder::next_of_blocks(double progress) {
    if (__builtin_expect(sample_ >= next_search_, 0)) {
        next_search_ = std::numeric_limits<int64_t>::max();
        for (size_t block = 0; block < valid_until_.size(); ++block) {
            if (block == stale_) continue;
            if (sample_ >= valid_until_[block]) find_leader<kBlock>(block, progress);
            next_search_ = std::min(next_search_, valid_until_[block]);
        }
    }
    // The leaders of the other blocks are compared while that of the stale one is sought: neither waits for the other.
    const Vector *weight = vectors(leader_weight_), *given = vectors(leader_given_), *dataset = vectors(leader_dataset_);
    const double last = last_;
    const auto compute = [=](size_t i, Vector &out) MEGALITE_INLINED {
        out = dataset[i] == last ? -kNever : weight[i] * progress - given[i];
    };
    Lead lead = find_lead(vectors(leader_lag_), dataset, leader_lag_.size() / kLanes, compute);
    if (stale_ != kNone) {
        const double stale_lag = find_leader<kBlock>(stale_, progress), stale_dataset = leader_dataset_[stale_];
        next_search_ = std::min(next_search_, valid_until_[stale_]);
        if (stale_lag > lead.lag || (stale_lag == lead.lag && stale_dataset < lead.dataset)) lead.dataset = stale_dataset;
    }
    const size_t member = static_cast<size_t>(member_of_[static_cast<size_t>(lead.dataset)]);
    stale_ = member / kBlock;
    last_ = lead.dataset;
    add_one(given_, member);
    return static_cast<int64_t>(lead.dataset);
}

int64_t BlendOrder::next() {
    const double progress = std::max(static_cast<double>(sample_), 1.0);
    const int64_t dataset = valid_until_.empty() ? next_of_few(progress)
                            : block_ == kSmall   ? next_of_blocks<kSmall>(progress)
                                                 : next_of_blocks<kLarge>(progress);
    ++counts_[static_cast<size_t>(dataset)];
    ++sample_;
    return dataset;
}

void BlendOrder::retire(int64_t dataset) {
    const int32_t member = member_of_[static_cast<size_t>(dataset)];
    given_[static_cast<size_t>(member)] = kInfinity;
    if (!valid_until_.empty()) valid_until_[static_cast<size_t>(member / block_)] = next_search_ = 0;
}
