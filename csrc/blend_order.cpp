// Which dataset gives sample i of a blend; see blend_order.h.
//
// Built with -ffp-contract=off: a fused multiply-subtract would round differently from Megatron-LM.
#include "blend_order.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "vector_clones.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFew = 24;                // up to here comparing all is faster than keeping blocks
constexpr int64_t kSmall = 16, kLarge = 32; // members of a block
constexpr int64_t kManyDatasets = 640;      // from here on large blocks, or the leaders are too many

struct Lead {
    double most;    // the largest lag
    double dataset; // the lowest dataset that has it
};

// Among `size` members with these weights and counts.
MEGALITE_VECTOR Lead largest_lag(const double *weight, const double *given, const double *dataset, int64_t size, double progress) {
    double most = -kInfinity, first = kInfinity;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < size; ++i) {
        const double lag = weight[i] * progress - given[i];
        most = lag > most ? lag : most;
    }
#pragma omp simd reduction(min : first)
    for (int64_t i = 0; i < size; ++i) {
        const double candidate = weight[i] * progress - given[i] == most ? dataset[i] : kInfinity;
        first = candidate < first ? candidate : first;
    }
    return {most, first};
}

// The same without dataset `except`, for a `size` that is a multiple of kSmall: four parts are joined first, as each step of a
// maximum waits for the one before.
MEGALITE_VECTOR Lead largest_lag_of_others(const double *weight, const double *given, const double *dataset, int64_t size,
                                           double progress, double except) {
    const int64_t part = size / 4;
    const auto greater = [](double a, double b) { return a > b ? a : b; };
    const auto lesser = [](double a, double b) { return a < b ? a : b; };
    const auto lag = [=](int64_t i) { return weight[i] * progress - given[i] - (dataset[i] == except ? kInfinity : 0.0); };
    double most = -kInfinity, first = kInfinity;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < part; ++i)
        most = greater(greater(greater(lag(i), lag(i + part)), greater(lag(i + 2 * part), lag(i + 3 * part))), most);
    const auto number = [=](int64_t i) { return dataset[i] + (lag(i) == most ? 0.0 : kInfinity); };
#pragma omp simd reduction(min : first)
    for (int64_t i = 0; i < part; ++i)
        first = lesser(lesser(lesser(number(i), number(i + part)), lesser(number(i + 2 * part), number(i + 3 * part))), first);
    return {most, first};
}

struct Margins {
    double above, below; // the largest lags among members with more weight than the leader, and with less
};

template <int64_t kBlock> MEGALITE_VECTOR Margins margins(const double *weight, const double *given, double own, double progress) {
    double above = -kInfinity, below = -kInfinity;
#pragma omp simd reduction(max : above, below)
    for (int64_t i = 0; i < kBlock; ++i) {
        const double lag = weight[i] * progress - given[i];
        const double heavier = weight[i] > own ? lag : -kInfinity, lighter = weight[i] < own ? lag : -kInfinity;
        above = heavier > above ? heavier : above;
        below = lighter > below ? lighter : below;
    }
    return {above, below};
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
    valid_until_.assign(blocks, 0);
}

int64_t BlendOrder::next_of_few(double progress) const {
    double most = -kInfinity;
    size_t chosen = 0;
    for (size_t i = 0; i < weight_.size(); ++i) {
        const double lag = weight_[i] * progress - given_[i];
        if (lag > most) {
            most = lag;
            chosen = i;
        }
    }
    return static_cast<int64_t>(chosen); // few datasets are not reordered
}

template <int64_t kBlock> void BlendOrder::find_leader(size_t block, double progress) {
    const size_t first = block * kBlock;
    const double *weight = weight_.data() + first, *given = given_.data() + first;
    const Lead lead = largest_lag(weight, given, dataset_.data() + first, kBlock, progress);
    if (lead.most == -kInfinity) { // all retired
        leader_given_[block] = leader_dataset_[block] = kInfinity;
        valid_until_[block] = std::numeric_limits<int64_t>::max();
        return;
    }
    const size_t leader = static_cast<size_t>(member_of_[static_cast<size_t>(lead.dataset)]);
    leader_weight_[block] = weight_[leader];
    leader_given_[block] = given_[leader];
    leader_dataset_[block] = lead.dataset;

    // Members with more weight than the leader may catch up, and the heaviest would do so first; those of equal weight keep
    // their distance exactly; those with less fall behind, but one within the rounding errors must be watched. The errors are
    // bounded for twice the present progress, so the promise is not made for longer than that.
    const double heaviest = weight[0], own = weight_[leader];
    const Margins others = margins<kBlock>(weight, given, own, progress);
    const double error = 16 * std::numeric_limits<double>::epsilon() * (heaviest * progress + 1);
    double steps = progress;
    if (others.above > -kInfinity) steps = std::min(steps, (lead.most - others.above - error) / (heaviest - own));
    if (lead.most - others.below <= error || !(steps > 1)) steps = 1;
    valid_until_[block] = sample_ + static_cast<int64_t>(steps);
}

template <int64_t kBlock> int64_t BlendOrder::next_leader(double progress) {
    if (sample_ >= next_search_) {
        next_search_ = std::numeric_limits<int64_t>::max();
        for (size_t block = 0; block < valid_until_.size(); ++block) {
            if (sample_ >= valid_until_[block] || block == stale_) find_leader<kBlock>(block, progress);
            next_search_ = std::min(next_search_, valid_until_[block]);
        }
        stale_ = kNone;
    }
    // The leaders of the other blocks are compared while that of the stale one is sought: neither waits for the other.
    const double *weight = leader_weight_.data(), *given = leader_given_.data(), *dataset = leader_dataset_.data();
    const double except = stale_ == kNone ? -1.0 : dataset[stale_];
    Lead lead = largest_lag_of_others(weight, given, dataset, static_cast<int64_t>(leader_weight_.size()), progress, except);
    if (stale_ != kNone) {
        find_leader<kBlock>(stale_, progress);
        next_search_ = std::min(next_search_, valid_until_[stale_]);
        const double lag = weight[stale_] * progress - given[stale_];
        if (lag > lead.most || (lag == lead.most && dataset[stale_] < lead.dataset)) lead.dataset = dataset[stale_];
    }
    stale_ = static_cast<size_t>(member_of_[static_cast<size_t>(lead.dataset)] / kBlock);
    return static_cast<int64_t>(lead.dataset);
}

int64_t BlendOrder::next() {
    const double progress = std::max(static_cast<double>(sample_), 1.0);
    const int64_t dataset = valid_until_.empty() ? next_of_few(progress)
                            : block_ == kSmall   ? next_leader<kSmall>(progress)
                                                 : next_leader<kLarge>(progress);
    const size_t member = static_cast<size_t>(member_of_[static_cast<size_t>(dataset)]);
    given_[member] = static_cast<double>(++counts_[static_cast<size_t>(dataset)]);
    ++sample_;
    return dataset;
}

void BlendOrder::retire(int64_t dataset) {
    const int32_t member = member_of_[static_cast<size_t>(dataset)];
    given_[static_cast<size_t>(member)] = kInfinity;
    if (!valid_until_.empty()) valid_until_[static_cast<size_t>(member / block_)] = next_search_ = 0;
}
