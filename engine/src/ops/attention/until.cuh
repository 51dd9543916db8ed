#if MASKED // query t sees key j only where t <= until[j]
#define UNTIL const int *until,
#else
#define UNTIL
constexpr const int *until = nullptr;
#endif
